"""The suite of small models on ALFWorld and WebShop: its plan, its recipes, its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import environments
from bench.environments import ENVIRONMENTS, RECIPES, STEPS, Spec
from bench.report import Report, environment


def row(env: str, method: str) -> dict[str, Any]:
    """As if a run had gone from 10 to 30 %."""
    spec = Spec(env, method, 0, STEPS[env][method])
    values = {"success": [0.1, 0.2, 0.3], "success_low": [0.0, 0.1, 0.2], "success_high": [0.2, 0.3, 0.4]}
    numbers = {"step": [0, 1, 2], "trajectories": [0, 64, 128], "task_score": [0.25, 0.3, 0.5]}
    return {"key": spec.key, **spec.head(), "seconds": 90.0, **values, **numbers}


def test_recipes_load_and_methods_sample_as_much() -> None:
    sampled = {}
    for env in ENVIRONMENTS:
        assert (RECIPES / f"{env}-small.yaml").is_file()
        for method, steps in STEPS[env].items():
            spec = Spec(env, method, 0, steps)
            config = spec.config(Path("start"))
            assert (config.env.name, config.method, config.run.steps) == (env, method, steps)
            assert config.policy.path == "start"
            assert spec.start_config.policy.path is None
            size = config.rollout.group_size
            on_policy = config.on_policy_tasks(config.swap.alpha) if method == "rspo" else config.rollout.tasks
            collected = config.swap.buffer_tasks / config.swap.k if method == "rspo" else 0
            dense = on_policy if method == "rspo" else 0
            sampled[env, method] = steps * size * (on_policy + dense + collected)
        assert sampled[env, "grpo"] / sampled[env, "rspo"] == pytest.approx(1.07, abs=0.005)


def test_runs_are_told_apart_by_all_that_makes_them() -> None:
    specs = [
        Spec("alfworld", "rspo", 0, 36),
        Spec("alfworld", "grpo", 0, 36),
        Spec("webshop", "rspo", 0, 36),
        Spec("alfworld", "rspo", 1, 36),
        Spec("alfworld", "rspo", 0, 37),
        Spec("alfworld", "rspo", 0, 36, ("rollout.tasks=4",)),
    ]
    assert len({spec.key for spec in specs}) == len(specs)
    assert specs[0].start_name == specs[1].start_name != specs[2].start_name


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    rows = [row(env, method) for env in ENVIRONMENTS for method in STEPS[env]]
    report = Report("environments", "cpu", environment("cpu"), {"data": {}}, rows)
    lines = [line for line in environments.table(report).splitlines() if line.startswith("| RSPO+GRPO")]
    assert len(lines) == 2
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells == [
        "RSPO+GRPO",
        "0",
        str(STEPS["alfworld"]["rspo"]),
        "128",
        "10.0",
        "25.0",
        "30.0",
        "20 to 40",
        "0.25 → 0.50",
        "2",
    ]
    environments.plot(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000

"""The paper suite: its plan, that a finished run is not made again, and tables that compare like with like."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rspo_toys import small_policy

from bench.execute import COLUMNS, execute, start_folder
from bench.paper.plan import EQUAL_TRAJECTORIES, FRESH_SEEDS, PAPER_SEEDS, STARTS, STEPS, Spec, plan, quick_plan
from bench.paper.tables import ABLATIONS, CENTERS, ablation_table, center_table, equal_cost_table, main_table

FIRST, SECOND = STARTS


def row_of(spec: Spec, success: float) -> dict[str, Any]:
    """As if a run had had the same success at every evaluation after the first."""
    steps = list(range(0, spec.steps + 1, 9))
    per_update = 896 / 3 if spec.method == "rspo" else 128
    columns = {name: [float(step > 0) * success for step in steps] for name in COLUMNS}
    counts = [round(per_update * step) for step in steps]
    return {
        "key": spec.key, "method": spec.method, "base": spec.base, "start": spec.start, "seed": spec.seed,
        "steps": spec.steps, "flags": list(spec.flags), "seconds": 1.0, "replay_zero_advantages": 0.25,
        **columns, "step": steps, "trajectories": counts, "tokens": counts,
    }  # fmt: skip


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith("|") and line.split("|")[1].strip() == name]
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_plan_has_every_seed_once_and_settings_that_exist() -> None:
    specs = plan()
    assert len({spec.key for spec in specs}) == len(specs)
    for spec in {(s.method, s.base, s.flags): s for s in specs}.values():
        config = spec.config(Path("start"))
        assert (config.run.steps, config.run.seed, config.policy.path) == (spec.steps, spec.seed, "start")
    by_start = {start: {s.seed for s in specs if s.start == start and s.base == "ppo"} for start in STARTS}
    assert by_start == {FIRST: set(PAPER_SEEDS), SECOND: set(FRESH_SEEDS)}
    for flags in CENTERS.values():
        for start in STARTS:
            assert set(FRESH_SEEDS) <= {s.seed for s in specs if (s.start, s.flags) == (start, flags)}
    sampled = STEPS // 3 * (3 * 14 * 8 + 28 * 8 + 3 * 14 * 8)
    assert sampled == EQUAL_TRAJECTORIES * 16 * 8
    assert {(spec.seed, spec.steps) for spec in quick_plan()} == {(0, 9)}


def test_tables_compare_runs_of_the_same_seeds() -> None:
    """RSPO+GRPO has run with more seeds than its neighbours, for the clip centres; those seeds are much better here."""
    rows = [row_of(s, 0.9 if s.seed in FRESH_SEEDS and s.start == FIRST else 0.3) for s in plan()]
    for name in ("GRPO", "RSPO+GRPO"):
        assert cells(main_table(rows, FIRST), name)[1:3] == ["3", "30.0 ± 0.0"]
        assert cells(main_table(rows, SECOND), name)[1:3] == ["5", "30.0 ± 0.0"]
        assert cells(equal_cost_table(rows, FIRST), name)[1:] == ["16,128", "30.0 ± 0.0"]
    table = ablation_table(rows, FIRST, ("sampling=reward", "sampling=random"))
    assert "sampling=random" in ABLATIONS
    for name in ("sampling=reward", "sampling=random"):
        assert cells(table, name)[1:3] == ["3", "30.0 ± 0.0"]
    assert cells(center_table(rows), "shift (paper)")[1:3] == ["5", "90.0 ± 0.0"]


class Stopped(Exception):
    """Ctrl-C or a full disk while the report is written."""


def test_a_finished_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the suite was stopped before its row was in the report; what waited then did not begin."""
    flags = ("rollout.tasks=2", "rollout.group_size=2", "env.options={max_turns: 2}", "evaluation.episodes=4")
    specs = [Spec("grpo", "grpo", FIRST, seed, steps=1, flags=flags) for seed in range(8)]
    for spec in specs:
        small_policy().save(start_folder(spec, tmp_path) / "start")

    def stop(rows: list[dict[str, Any]]) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        execute(specs, [], tmp_path, 1, stop)
    finished = {spec.key for spec in specs if (tmp_path / spec.key / "row.json").is_file()}
    assert 1 <= len(finished) < len(specs)
    before = {key: (tmp_path / key / "metrics.jsonl").stat().st_mtime_ns for key in finished}
    saved: list[int] = []
    rows = execute(specs, [], tmp_path, 1, lambda found: saved.append(len(found)))
    assert [row["key"] for row in rows] == [spec.key for spec in specs]
    assert saved == list(range(1, 9))
    assert {key: (tmp_path / key / "metrics.jsonl").stat().st_mtime_ns for key in finished} == before
    assert all(row["step"] == [0, 1] and len(row["success"]) == 2 for row in rows)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", None)
    assert execute(specs, rows, tmp_path, 1, lambda found: None) == rows

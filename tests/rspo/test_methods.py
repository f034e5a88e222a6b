"""Every method, plain and under RSPO, through whole runs at the smallest size; epochs, schedules, layouts, packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_config, small_policy

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import update
from rspo.cli import main
from rspo.cli.parser import make_parser
from rspo.cli.settings import settings_of
from rspo.config import METHODS, Config, ConfigError, default_config, paper_config
from rspo.config.files import apply_flags, load_config, preset
from rspo.data.batch import Batch
from rspo.models.agent import Agent
from rspo.runs.records import read_metrics
from rspo.start import open_run

SMALL = [
    "swap.k=2",
    "swap.alpha=0.25",
    "optimizer.minibatches=2",
    "evaluation.episodes=8",
    "evaluation.every=0",
    "env.options={max_turns: 3}",
    "run.steps=2",
]
GROUPED = ["rollout.tasks=4", "rollout.group_size=2", "swap.buffer_tasks=3"]
ONE_STEP = ["optimizer.minibatches=1"]
SINGLE = ["rollout.tasks=8", "rollout.group_size=1", "swap.buffer_tasks=6"]


def run(config: Config, folder: Path) -> list[dict[str, Any]]:
    trainer = open_run(config, folder, progress=False)
    before = [p.clone() for p in trainer.agent.policy.model.parameters()]
    try:
        trainer.train()
    finally:
        trainer.close()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.agent.policy.model.parameters(), strict=True))
    return read_metrics(folder)


@pytest.mark.parametrize("layout", ["per_turn", "conversation"])
@pytest.mark.parametrize(
    ("method", "base"),
    [(name, "grpo") for name in METHODS if name != "rspo"] + [("rspo", name) for name in METHODS if name != "rspo"],
)
def test_every_method_trains_in_either_layout(start: Path, tmp_path: Path, method: str, base: str, layout: str) -> None:
    ppo = "ppo" in (method, base)
    flags = [*SMALL, *(SINGLE if ppo else GROUPED), f"policy.path={start}", f"env.layout={layout}"]
    # Not all groups fail under a penalty for each invalid action, and every method has something to learn.
    config = apply_flags(default_config(method, base), [*flags, "estimator.invalid_penalty=0.1"])
    records = run(config, tmp_path)
    updates = [record for record in records if record["kind"] == "update"]
    assert len(updates) == 2
    assert ("critic/loss" in updates[-1]) == ppo
    assert all(np.isfinite(value) for record in updates for value in record.values() if isinstance(value, float))
    if method == "rspo":
        # 2 updates of B on 3/4 of 8 trajectories and a collection of 6, then 2 updates of A.
        assert updates[-1]["trajectories"] == 2 * 6 + 6 + 2 * 6
        assert updates[-1]["replay/trajectories"] == 2
        assert updates[-1]["replay/num_tokens"] > 0
    else:
        assert updates[-1]["trajectories"] == 16
        assert "replay/num_tokens" not in updates[-1]


def test_packing_changes_nothing_but_the_way(start: Path, tmp_path: Path) -> None:
    results = []
    for packing in ("off", "on"):
        flags = [*SMALL, *SINGLE, f"policy.path={start}", f"policy.packing={packing}", "env.layout=conversation"]
        config = apply_flags(default_config("ppo"), [*flags, "run.steps=1", "estimator.invalid_penalty=0.1", *ONE_STEP])
        results.append(run(config, tmp_path / packing)[1])
    for name in ("loss", "critic/loss", "gradient_norm", "entropy", "reward"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-4, abs=1e-6), name


def test_methods_through_the_command_line(start: Path, tmp_path: Path) -> None:
    sets = [part for flag in [*SMALL, *GROUPED] for part in ("--set", flag)]
    out = tmp_path / "run"
    command = ["train", "--method", "rspo", "--base", "gigpo", "--env", "household", "--policy", str(start), "--quiet"]
    assert main([*command, "--out", str(out), *sets]) == 0
    config = load_config(out / "config.yaml")
    assert (config.method, config.base, config.title) == ("rspo", "gigpo", "RSPO+GiGPO")
    assert main(["train", "--resume", "--out", str(out), "--base", "rloo", "--quiet"]) == 2


@pytest.mark.parametrize("how", [["--base", "ppo"], ["--set", "base=ppo"], ["--method", "grpo", "--set", "method=ppo"]])
def test_the_preset_is_the_methods_however_it_is_named(how: list[str]) -> None:
    config = settings_of(make_parser().parse_args(["train", *how]))
    assert (config.rollout.tasks, config.rollout.group_size) == (128, 1)


def test_ppo_takes_as_many_trajectories_without_groups(tmp_path: Path) -> None:
    for config in (default_config("ppo"), default_config("rspo", "ppo"), paper_config("rspo", "ppo")):
        assert (config.rollout.tasks, config.rollout.group_size, config.swap.buffer_tasks) == (128, 1, 224)
        assert (config.on_policy_tasks(1 / 8), config.replay_size(1 / 8)) == (112, 16)
    assert paper_config("ppo").critic.learning_rate == 1e-5
    # A file's own method decides which preset its settings are laid over.
    (tmp_path / "c.yaml").write_text("method: rspo\nbase: ppo\nswap: {k: 5}\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.rollout.group_size, config.swap.k, config.estimator_name) == (1, 5, "ppo")
    assert preset("paper", "gigpo").rollout.group_size == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["method=rloo", "rollout.group_size=1"], r"rollout\.group_size must be >= 2 with 'rloo'"),
        (["base=rloo", "estimator.rows=true"], r"estimator\.rows must be false with 'rloo', got true"),
        (["base=gigpo", "rollout.group_size=1"], r"rollout\.group_size must be >= 2 with 'gigpo'"),
        (["estimator.gamma=1.5"], r"estimator\.gamma must be in \[0, 1\], got 1\.5"),
        (["estimator.lam=-1"], r"estimator\.lam must be in \[0, 1\]"),
        (["estimator.level=rows"], r"estimator\.level must be one of 'trajectory', 'turn', 'token'"),
        (["estimator.similarity=0"], r"estimator\.similarity must be in \(0, 1\]"),
        (["critic.backbone=both"], r"critic\.backbone must be one of 'own', 'shared'"),
        (["critic.value_clip=0"], r"critic\.value_clip must be > 0"),
        (["optimizer.schedule=step"], r"optimizer\.schedule must be one of 'constant', 'linear', 'cosine'"),
        (["optimizer.epochs=0"], r"optimizer\.epochs must be >= 1"),
        (["env.layout=flat"], r"env\.layout must be one of 'per_turn', 'conversation'"),
        (["policy.packing=yes please"], r"policy\.packing must be one of 'auto', 'on', 'off'"),
    ],
)
def test_settings_of_methods_are_checked(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_flags(default_config(), flags)


def test_learning_rate_schedules() -> None:
    config = apply_flags(Config(), ["run.steps=10", "optimizer.schedule=linear", "optimizer.warmup_updates=2"])
    factors = [config.learning_rate_factor(step) for step in range(10)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *(1 - i / 8 for i in range(8))])
    cosine = apply_flags(Config(), ["run.steps=10", "optimizer.schedule=cosine"])
    assert cosine.learning_rate_factor(5) == pytest.approx(0.5)
    assert Config().learning_rate_factor(53) == 1.0
    assert config.learning_rate_factor(11) == factors[-1], "of agent B, whose loop is longer than what is left"


def test_a_schedule_sets_the_optimisers_rates() -> None:
    agent = Agent(small_policy(), small_config("critic.learning_rate=0.01", method="ppo"), has_critic=True)
    agent.set_learning_rates(0.5)
    assert agent.critic_optimizer is not None
    assert agent.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-3)
    assert agent.critic_optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    twin = agent.branch()
    twin.set_learning_rates()
    assert twin.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_agent_b_moves_along_its_own_copy_of_the_schedule(start: Path, tmp_path: Path) -> None:
    flags = [*SMALL, *GROUPED, "run.steps=3", "optimizer.warmup_updates=1", "optimizer.schedule=linear"]
    sets = [part for flag in flags for part in ("--set", flag)]
    command = ["train", "--method", "rspo", "--env", "household", "--policy", str(start), "--quiet"]
    assert main([*command, "--out", str(tmp_path / "run"), *sets]) == 0
    of_a, of_b = (
        [record["learning_rate"] for record in read_metrics(tmp_path / "run", kind)] for kind in ("update", "dense")
    )
    assert of_a == pytest.approx([0.5e-3, 1e-3, 0.5e-3])
    assert of_b == [of_a[0], of_a[1], of_a[2], of_a[2]], "the run ends within the last loop"


def test_epochs_pass_over_the_data_again_against_the_same_old_policy() -> None:
    made = [make_trajectory(0, i, turns=3, advantage=(-1.0) ** i) for i in range(4)]
    stats = {}
    for epochs in (1, 3):
        config = apply_flags(small_config(), [f"optimizer.epochs={epochs}", "optimizer.learning_rate=0.01"])
        agent = Agent(small_policy(), config)
        batch = Batch.from_trajectories(made)
        with torch.no_grad():
            logp, _ = agent.policy.logprobs(batch, 1.0)
        batch.old_logp.copy_(logp)
        batch.behavior_logp.copy_(logp)
        steps = []
        step = agent.step
        agent.step = lambda step=step, steps=steps: (steps.append(1), step())  # type: ignore[method-assign, misc]
        stats[epochs] = update(agent, batch, made, config, 0.0, np.random.default_rng(0), PhaseTimer())
        assert len(steps) == 2 * epochs
        assert stats[epochs]["num_tokens"] == epochs * batch.num_tokens
    assert stats[3]["approx_kl_k3"] > 2 * stats[1]["approx_kl_k3"], "later epochs are further from the old policy"

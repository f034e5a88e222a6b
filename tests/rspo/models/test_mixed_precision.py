"""Policies in bfloat16: float32 weights behind them, and log-probs that begin an update with a ratio of 1."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rspo_toys import make_trajectory, small_config, small_policy

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import rescore, update
from rspo.config import Config
from rspo.config.files import apply_flags
from rspo.data.batch import Batch
from rspo.models.agent import Agent
from rspo.models.optimizer import MasterAdamW
from rspo.models.policy import Policy, score
from rspo.runs.checkpoint import load_checkpoint, save_checkpoint
from rspo.runs.records import read_metrics
from rspo.start import open_run


def bf16_config(*flags: str, method: str = "grpo") -> Config:
    return apply_flags(small_config(method=method), ["policy.dtype=bfloat16", *flags])


def bf16_agent(config: Config, has_critic: bool = False) -> Agent:
    """As runs load it: transformers keeps the rotary frequencies in float32, which Module.to would round."""
    with tempfile.TemporaryDirectory() as folder:
        small_policy().save(folder)
        return Agent(Policy.load(folder, config.policy), config, has_critic)


def train(agent: Agent, config: Config, updates: int) -> None:
    made = [make_trajectory(0, i, turns=3, advantage=(-1.0) ** i) for i in range(4)]
    rescore(agent.policy, made, config)
    batch = Batch.from_trajectories(made)
    for i in range(updates):
        update(agent, batch, made, config, 0.0, np.random.default_rng(i), PhaseTimer())


def test_small_steps_add_up() -> None:
    """Steps far below bfloat16's resolution: each is lost in the model's own weights, their sum is not."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight])
    optimizer.param_groups[0].update(lr=1e-4, weight_decay=0.0)
    moved = []
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.take_gradients()
        optimizer.step()
        moved.append(float(weight[0].detach()))
    assert moved[0] == 1.0, "one step is less than half a place"
    assert moved[-1] == pytest.approx(0.98, abs=4e-3)
    plain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    lost = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        plain.grad = torch.ones_like(plain)
        lost.step()
    assert float(plain.detach()[0]) == 1.0, "without masters nothing moves"


def test_float32_weights_are_their_own_masters() -> None:
    agent = Agent(small_policy(), small_config())
    assert agent.optimizer.copies == []
    assert agent.optimizer.state_dict()["masters"] == []


def test_agent_b_takes_the_float32_weights_along() -> None:
    config = bf16_config("optimizer.learning_rate=1e-5")
    agent = bf16_agent(config)
    train(agent, config, 2)
    masters = [master.clone() for _, master in agent.optimizer.copies]
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters), "they hold more than the model does"
    for fresh in (False, True):
        twin = agent.branch(fresh_optimizer=fresh)
        assert all(torch.equal(a, b) for a, (_, b) in zip(masters, twin.optimizer.copies, strict=True))
        assert bool(twin.optimizer.optimizer.state_dict()["state"]) != fresh
        train(twin, config, 1)
        assert all(torch.equal(a, b) for a, (_, b) in zip(masters, agent.optimizer.copies, strict=True))


@pytest.mark.parametrize("has_critic", [False, True])
def test_checkpoints_keep_the_float32_weights(tmp_path: Path, has_critic: bool) -> None:
    config = bf16_config("optimizer.learning_rate=1e-5")
    agent = bf16_agent(config, has_critic)
    if not has_critic:
        train(agent, config, 2)
    save_checkpoint(tmp_path / "step-000001", agent, {"step": 1})
    again = load_checkpoint(tmp_path / "step-000001", config, has_critic).agent
    pairs = zip(agent.optimizer.copies, again.optimizer.copies, strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert len(agent.optimizer.copies) == len(list(agent.policy.model.parameters()))
    if not has_critic:
        for one in (agent, again):
            train(one, config, 1)
        pairs = zip(agent.optimizer.copies, again.optimizer.copies, strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_rescored_responses_begin_with_ratio_one() -> None:
    config = bf16_config()
    agent = bf16_agent(config)
    made = [make_trajectory(0, i, turns=3, advantage=1.0) for i in range(3)]
    before = [turn.behavior_logp.copy() for trajectory in made for turn in trajectory.turns]
    rescore(agent.policy, made, config)
    batch = Batch.from_trajectories(made)
    assert torch.equal(score(agent.policy, batch, 1.0, config.optimizer.micro_batch_tokens), batch.old_logp)
    after = [turn.behavior_logp for trajectory in made for turn in trajectory.turns]
    assert [a.shape for a in after] == [b.shape for b in before]
    assert not np.allclose(np.concatenate(after), np.concatenate(before))
    stats = update(agent, batch, made, replace(config), 0.0, np.random.default_rng(0), PhaseTimer())
    assert stats["clip_frac_low"] == stats["clip_frac_high"] == 0


def test_rescoring_is_for_policies_that_round() -> None:
    assert not Config().rescores
    assert bf16_config().rescores
    assert not bf16_config("rollout.rescore=off").rescores
    assert apply_flags(Config(), ["rollout.rescore=on"]).rescores


@pytest.mark.parametrize("method", ["rspo", "ppo"])
def test_a_bfloat16_run(tmp_path: Path, method: str) -> None:
    start = tmp_path / "start"
    small_policy().save(start)
    flags = [f"policy.path={start}", "run.steps=1", "env.options={max_turns: 3}", "estimator.invalid_penalty=0.1"]
    flags += ["rollout.tasks=8", "rollout.group_size=1"] if method == "ppo" else []
    trainer = open_run(bf16_config(*flags, method=method), tmp_path / "run", progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    assert trainer.agent.policy.model.dtype == torch.bfloat16
    (record,) = read_metrics(tmp_path / "run", "update")
    assert record["gradient_norm"] > 0
    assert np.isfinite(record["loss"])

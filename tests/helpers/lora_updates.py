"""Updates and runs of adapters, and how their weights are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rspo_toys import make_trajectory
from torch import Tensor

from rspo.algorithm.estimators import make_estimator
from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import prepare, update
from rspo.config import Config
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.start import open_run

ALPHA = 0.25


def mixed_trajectories() -> list[Trajectory]:
    on_policy = [make_trajectory(0, i, turns=3 + i % 2, reward=float(i % 2), advantage=(-1.0) ** i) for i in range(4)]
    return [*on_policy, replace(make_trajectory(1, 0, turns=2, advantage=2.0), source=REPLAY)]


def prepared(agent: Agent, config: Config, reference: Policy | None = None) -> Batch:
    made = mixed_trajectories()
    batch = Batch.from_trajectories(made)
    with torch.no_grad():
        logp, _ = agent.policy.logprobs(batch, config.rollout.temperature)
    written = torch.where(batch.is_replay, batch.behavior_logp, logp)
    batch = replace(batch, behavior_logp=written, old_logp=written)
    batch = prepare(agent, batch, made, config, reference)
    return make_estimator(config.estimator_name, config.estimator).at_update(batch)


def run_update(agent: Agent, config: Config, reference: Policy | None = None) -> dict[str, float]:
    batch = prepared(agent, config, reference)
    return update(agent, batch, mixed_trajectories(), config, ALPHA, np.random.default_rng(0), PhaseTimer())


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(config: Config, folder: Path, resume: bool = False) -> None:
    trainer = open_run(config, folder, resume=resume, progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()

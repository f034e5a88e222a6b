"""Updates on trajectories of one's own making."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from rspo_toys import make_trajectory

from rspo.algorithm.timing import PhaseTimer
from rspo.algorithm.update import prepare, update
from rspo.config import Config
from rspo.data.batch import Batch
from rspo.data.trajectory import REPLAY, Trajectory
from rspo.models.agent import Agent

ALPHA = 0.25


def mixed_trajectories() -> list[Trajectory]:
    on_policy = [make_trajectory(0, i, turns=3 + i % 2, advantage=(-1.0) ** i) for i in range(6)]
    replayed = [replace(make_trajectory(1, i, turns=2, advantage=2.0), source=REPLAY) for i in range(2)]
    return [*on_policy, *replayed]


def scored_batch(agent: Agent, config: Config, trajectories: list[Trajectory]) -> Batch:
    """A batch whose on-policy rows were written by the agent itself."""
    batch = Batch.from_trajectories(trajectories)
    with torch.no_grad():
        logp, _ = agent.policy.logprobs(batch, config.rollout.temperature)
    written = torch.where(batch.is_replay, batch.behavior_logp, logp)
    return prepare(agent, replace(batch, behavior_logp=written, old_logp=written), trajectories, config, None)


def run_update(
    agent: Agent, config: Config, trajectories: list[Trajectory], batch: Batch | None = None
) -> dict[str, float]:
    batch = scored_batch(agent, config, trajectories) if batch is None else batch
    return update(agent, batch, trajectories, config, ALPHA, np.random.default_rng(0), PhaseTimer())

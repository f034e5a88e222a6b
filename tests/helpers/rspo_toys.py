"""Small things for the trainer's tests: an environment with prompts of many lengths, tiny policies, trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rspo_parity import ParityEnv

from rspo.config import Config, default_config
from rspo.config.files import apply_flags
from rspo.data.trajectory import Trajectory, Turn
from rspo.envs.household import VOCABULARY
from rspo.models.policy import Policy
from rspo.models.tiny import tiny_policy

__all__ = ["ParityEnv", "copies", "make_trajectory", "small_config", "small_policy"]


def small_config(*flags: str, method: str = "rspo") -> Config:
    """Household settings at a size for tests."""
    small = [
        "rollout.tasks=4",
        "rollout.group_size=4",
        "swap.k=2",
        "swap.alpha=0.25",
        "swap.buffer_tasks=3",
        "optimizer.minibatches=2",
        "evaluation.every=0",
        "evaluation.episodes=8",
        "run.steps=2",
    ]
    return apply_flags(default_config(method), [*small, *flags])


def small_policy(seed: int = 0) -> Policy:
    """A fresh tiny policy."""
    return tiny_policy(VOCABULARY, seed, Config().policy)


def make_trajectory(
    group: int = 0,
    index: int = 0,
    *,
    turns: int = 2,
    reward: float = 0.0,
    task_score: float | None = None,
    advantage: float | None = None,
    invalid: Sequence[int] = (),
    seed: int = 0,
) -> Trajectory:
    """A trajectory with random tokens; reward comes at the last turn, `advantage` is the same at all turns."""
    rng = np.random.default_rng((seed, group, index))
    made = [
        Turn(
            prompt_ids=rng.integers(3, 40, size=3 + turn),
            response_ids=rng.integers(3, 40, size=1 + turn % 2),
            behavior_logp=rng.normal(-2.0, 0.5, size=1 + turn % 2).astype(np.float32),
            reward=reward if turn == turns - 1 else 0.0,
            dense_reward=0.1 * turn,
            anchor=f"place {turn % 2}",
            action="go",
            is_action_valid=turn not in invalid,
        )
        for turn in range(turns)
    ]
    trajectory = Trajectory(task=f"task {group}", group=group, index=index, turns=made)
    trajectory.won = reward > 0
    trajectory.task_score = float(reward > 0) if task_score is None else task_score
    trajectory.rewards = np.array([turn.reward for turn in made], dtype=np.float32)
    if advantage is not None:
        trajectory.advantages = np.full(turns, advantage, dtype=np.float32)
    return trajectory


def copies(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories that can be relabelled without touching the originals."""
    return [replace(trajectory) for trajectory in trajectories]

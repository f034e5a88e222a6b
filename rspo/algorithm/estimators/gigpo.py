"""GiGPO: a trajectory against its group, plus each turn against the turns that began in the same state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rspo_kernels import anchor_ids, step_advantages

from ...data.trajectory import Trajectory
from .base import Estimator, labels

GAMMA = 0.95


class GiGPO(Estimator):
    """A = A_episode + w·A_step (Feng et al. 2025; `rspo_kernels.step_advantages`).

    The step level compares discounted returns of turns of one group whose observation was the same. Under dense
    rewards both levels are made of them: their sum, and their discounted returns.
    """

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the advantages of complete groups."""
        config = self.config
        lengths = np.array([len(trajectory) for trajectory in trajectories])
        groups = np.repeat([trajectory.group for trajectory in trajectories], lengths)
        anchors = [turn.anchor for trajectory in trajectories for turn in trajectory.turns]
        result = step_advantages(
            torch.from_numpy(np.concatenate([labels(trajectory) for trajectory in trajectories])),
            torch.from_numpy(groups),
            torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            anchor_ids(anchors, groups.tolist(), config.similarity),
            gamma=GAMMA if config.gamma is None else config.gamma,
            step_weight=config.step_weight,
            mode="mean_std_norm" if config.std else "mean_norm",
            rows=config.rows,
            singleton=config.singleton,
            penalties=torch.from_numpy(np.concatenate([self.penalties(trajectory) for trajectory in trajectories])),
        )
        parts = np.split(result.advantages.numpy(), np.cumsum(lengths)[:-1])
        for trajectory, advantages in zip(trajectories, parts, strict=True):
            trajectory.advantages = advantages

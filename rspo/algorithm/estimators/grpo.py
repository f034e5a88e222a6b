"""GRPO: the total reward of a trajectory against its group's mean, in units of its group's deviation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rspo_kernels import group_advantages

from ...data.trajectory import Trajectory
from .base import Estimator, labels


class GRPO(Estimator):
    """A_i = (R_i - mean R)/(std R + 1e-6) over the trajectories of a group, the same for all turns of trajectory i.

    `rows=True` takes mean and deviation over the group's rows (turns), as verl-agent does: a long trajectory then
    counts as often as it has turns, and a turn's invalid-action penalty is part of its row's score. Over
    trajectories the penalty is taken off the turn's advantage after normalisation: in a group without variance,
    dividing it by the deviation would make it arbitrarily large (verl-agent's rows: -8.8 for one invalid row of 80).
    """

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the advantages of complete groups."""
        lengths = np.array([len(trajectory) for trajectory in trajectories])
        returns = np.array([labels(trajectory).sum() for trajectory in trajectories], dtype=np.float32)
        groups = np.array([trajectory.group for trajectory in trajectories])
        penalty = np.concatenate([self.penalties(trajectory) for trajectory in trajectories])

        if self.config.rows:
            rows = self.normalize(np.repeat(returns, lengths) - penalty, np.repeat(groups, lengths))
        else:
            rows = np.repeat(self.normalize(returns, groups), lengths) - penalty
        for trajectory, advantages in zip(trajectories, np.split(rows, np.cumsum(lengths)[:-1]), strict=True):
            trajectory.advantages = advantages

    def normalize(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Scores float32 [n] against those of their group."""
        return group_advantages(
            torch.from_numpy(scores),
            torch.from_numpy(groups),
            scale="std" if self.config.std else None,
            singleton=self.config.singleton,
        ).numpy()

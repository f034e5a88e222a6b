"""What every advantage estimator does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ...config import EstimatorConfig
from ...data.batch import Batch
from ...data.trajectory import Trajectory

_Truth = TypeVar("_Truth", bool, Tensor)


class Estimator:
    """Turns labelled trajectories into advantages, at either of two moments; a subclass takes the one that suits it.

    `__call__`, when trajectories have been sampled and labelled: for advantages against a group. All members of a
    group are there; replayed trajectories keep the advantages of the group they were collected in.
    `at_update`, when a batch is about to be trained on: for advantages that need a critic, or statistics of the whole
    mixed batch.

    Args:
        config: the estimator's settings.
    """

    needs_critic = False
    """Whether agents need a critic; batches then come to `at_update` with values and bootstrap."""

    def __init__(self, config: EstimatorConfig) -> None:
        self.config = config

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Set `advantages`, float32 [turns], of complete groups from their `rewards`."""

    def at_update(self, batch: Batch) -> Batch:
        """The batch with its final advantages (and, with a critic, returns)."""
        return batch

    def penalties(self, trajectory: Trajectory) -> np.ndarray:
        """What turns pay for being invalid (`EstimatorConfig.invalid_penalty_on`), float32 [turns]."""
        fine = [self._is_fine(turn.is_well_formed, turn.is_action_valid) for turn in trajectory.turns]
        return np.float32(self.config.invalid_penalty) * ~np.array(fine, dtype=bool)

    def batch_penalties(self, batch: Batch) -> Tensor:
        """As `penalties`, of a batch's turns, float32 [turns]."""
        fine = self._is_fine(batch.turn_well_formed, batch.turn_valid)
        return self.config.invalid_penalty * (~fine).to(batch.rewards.dtype)

    def _is_fine(self, well_formed: _Truth, valid: _Truth) -> _Truth:
        return well_formed if self.config.invalid_penalty_on == "format" else valid

    def turn_rewards(self, batch: Batch) -> Tensor:
        """Rewards of a batch's turns less what they pay for being invalid, float32 [turns]."""
        last = torch.cumsum(batch.turn_lengths, 0) - 1
        return batch.rewards[last] - self.batch_penalties(batch)


def labels(trajectory: Trajectory) -> np.ndarray:
    """The rewards of a labelled trajectory, float32 [turns]. Raises ValueError where `relabel` was forgotten."""
    if trajectory.rewards is None:
        raise ValueError(f"{trajectory} has no rewards; call rspo.algorithm.rewards.relabel first")
    return trajectory.rewards

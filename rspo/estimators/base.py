"""What every advantage estimator does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..trajectory import Trajectory


class Estimator(ABC):
    """Turns labelled trajectories into advantages.

    An estimator reads `trajectory.rewards` and writes `trajectory.advantages`, float32 [turns]. It must be given all
    members of a group together: replayed trajectories keep the advantages of the group they were collected in.
    """

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the advantages of complete groups."""


def labels(trajectory: Trajectory) -> np.ndarray:
    """The rewards of a labelled trajectory, float32 [turns]. Raises ValueError where `relabel` was forgotten."""
    if trajectory.rewards is None:
        raise ValueError(f"{trajectory} has no rewards; call rspo.rewards.relabel first")
    return trajectory.rewards

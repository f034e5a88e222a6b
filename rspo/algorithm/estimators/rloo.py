"""RLOO: the total reward of a trajectory against the mean of the others of its group (Ahmadian et al. 2024)."""

from __future__ import annotations

import numpy as np
import torch

from rspo_kernels import group_advantages

from .grpo import GRPO


class RLOO(GRPO):
    """A_i = R_i - mean of R_j over j ≠ i, the same for all turns of trajectory i; penalties as in GRPO."""

    def normalize(self, scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Scores float32 [n] against those of the others in their group."""
        return group_advantages(
            torch.from_numpy(scores),
            torch.from_numpy(groups),
            baseline="leave_one_out",
            scale=None,
            singleton=self.config.singleton,
        ).numpy()

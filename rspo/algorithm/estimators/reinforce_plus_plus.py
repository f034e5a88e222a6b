"""REINFORCE++: discounted returns, normalized over the whole batch (Hu 2025)."""

from __future__ import annotations

from dataclasses import replace

import torch

from rspo_kernels import Segments, discounted_returns, masked_whiten

from ...data.batch import Batch
from .base import Estimator


class ReinforcePlusPlus(Estimator):
    """A = (G - mean G)/sqrt(var G + 1e-8) over the response tokens of the batch an update is made of, replayed ones
    included; G_t = r_t + γ·G_{t+1} over a trajectory's turns, γ = 1 unless configured."""

    def at_update(self, batch: Batch) -> Batch:
        """The batch with its advantages."""
        segments = Segments.from_lengths(torch.ones_like(batch.turn_lengths), turn_sequence=batch.turn_trajectory)
        gamma = 1.0 if self.config.gamma is None else self.config.gamma
        returns = discounted_returns(self.turn_rewards(batch), gamma=gamma, segments=segments)
        return replace(batch, advantages=masked_whiten(returns[batch.token_turn]))

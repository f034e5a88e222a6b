"""PPO: generalized advantage estimation with a critic."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rspo_kernels import Segments, gae, masked_whiten

from ...data.batch import Batch
from .base import Estimator


class PPO(Estimator):
    """Advantages and returns by GAE, made when a batch is trained on, from the trained agent's own critic: replayed
    trajectories are valued by it too, and whitening is over the mixed batch.

    `level` says what GAE steps through (`EstimatorConfig`). A turn pays for being invalid in its own reward.
    """

    needs_critic = True

    def at_update(self, batch: Batch) -> Batch:
        """The batch with advantages and returns."""
        if batch.values is None or batch.bootstrap is None:
            raise ValueError("PPO needs a batch with values and bootstrap; call rspo.algorithm.update.prepare first")
        make = {"trajectory": self._over_tokens, "turn": self._over_turns, "token": self._inside_turns}
        advantages, returns = make[self.config.level](batch, batch.values, batch.bootstrap)
        if self.config.whiten:
            advantages = masked_whiten(advantages)
        return replace(batch, advantages=advantages, returns=returns)

    @property
    def _gamma(self) -> float:
        return 1.0 if self.config.gamma is None else self.config.gamma

    def _gae(
        self, rewards: Tensor, values: Tensor, segments: Segments, level: str, bootstrap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return gae(
            rewards,
            values,
            gamma=self._gamma,
            lam=self.config.lam,
            segments=segments,
            level=level,
            bootstrap=bootstrap,
        )

    def _over_tokens(self, batch: Batch, values: Tensor, bootstrap: Tensor) -> tuple[Tensor, Tensor]:
        segments = batch.trajectory_segments()
        ends = batch.last_tokens(range(segments.num_sequences))
        rewards = _at_last_tokens(self.turn_rewards(batch), batch)
        return self._gae(rewards, values, segments, "trajectory", bootstrap[ends])

    def _over_turns(self, batch: Batch, values: Tensor, bootstrap: Tensor) -> tuple[Tensor, Tensor]:
        """A turn is one step, valued at its first token; all of its tokens share advantage and return."""
        lengths = batch.turn_lengths
        first = torch.cumsum(lengths, 0) - lengths
        segments = Segments.from_lengths(torch.ones_like(lengths), turn_sequence=batch.turn_trajectory)
        ends = batch.last_tokens(range(segments.num_sequences))
        made = self._gae(self.turn_rewards(batch), values[first], segments, "trajectory", bootstrap[ends])
        advantages, returns = (x[batch.token_turn] for x in made)
        return advantages, returns

    def _inside_turns(self, batch: Batch, values: Tensor, bootstrap: Tensor) -> tuple[Tensor, Tensor]:
        """Each turn ends with its trajectory's total reward and nothing after it."""
        totals = batch.rewards.new_zeros(int(batch.turn_trajectory.max()) + 1)
        totals.index_add_(0, batch.turn_trajectory[batch.token_turn], batch.rewards)
        rewards = _at_last_tokens(totals[batch.turn_trajectory] - self.batch_penalties(batch), batch)
        return self._gae(rewards, values, batch.trajectory_segments(), "turn", None)


def _at_last_tokens(turn_rewards: Tensor, batch: Batch) -> Tensor:
    """Rewards of turns [T] at the turns' last tokens, float32 [N]."""
    rewards = torch.zeros_like(batch.rewards)
    rewards[torch.cumsum(batch.turn_lengths, 0) - 1] = turn_rewards
    return rewards

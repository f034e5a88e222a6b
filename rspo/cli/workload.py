"""How much a run does: trajectories, rows, mini-batches, tokens and floating-point operations, from its settings alone.

An episode has as many turns as it takes, so most counts are a range: from one turn each to the turn limit. Counts of
tokens are upper bounds: every prompt and every response as long as they may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Config
from ..models.shapes import ModelShape


@dataclass(frozen=True)
class Between:
    """A count that lies between two numbers."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Workload:
    """The batch arithmetic of a configuration.

    Args:
        config: all settings. Under a schedule of α, counts are those of the first loop.
        max_turns: the environment's turn limit.
    """

    config: Config
    max_turns: int

    @property
    def alpha(self) -> float:
        """Share of replay; 0 without RSPO."""
        return self.config.alpha_at(0) if self.config.method == "rspo" else 0.0

    @property
    def replayed(self) -> int:
        """Trajectories that an update of A replays."""
        return self.config.replay_size(self.alpha)

    @property
    def on_policy(self) -> int:
        """Trajectories that are sampled for an update of A, or of B."""
        return self.config.on_policy_tasks(self.alpha) * self.config.rollout.group_size

    @property
    def has_agent_b(self) -> bool:
        """Whether a loop has an agent B."""
        return self.replayed > 0 and self.config.swap.source != "history"

    @property
    def collected(self) -> int:
        """Trajectories that B collects in a loop."""
        return self.config.swap.buffer_tasks * self.config.rollout.group_size if self.has_agent_b else 0

    @property
    def updates_a(self) -> int:
        """Updates of A in a loop."""
        return min(self.config.swap.k, self.config.run.steps) if self.config.method == "rspo" else 1

    @property
    def updates_b(self) -> int:
        """Updates of B in a loop."""
        return self.config.swap.k if self.has_agent_b else 0

    @property
    def sampled(self) -> int:
        """Trajectories that a loop samples, B's included."""
        return (self.updates_a + self.updates_b) * self.on_policy + self.collected

    @property
    def sampled_without_swap(self) -> int:
        """Trajectories that the base method alone samples for as many updates."""
        return self.updates_a * self.config.rollout.tasks * self.config.rollout.group_size

    @property
    def sampled_in_run(self) -> int:
        """Trajectories that a run samples for training; its last loop may have fewer updates of A."""
        loops = -(-self.config.run.steps // self.updates_a)
        return self.config.run.steps * self.on_policy + loops * (self.updates_b * self.on_policy + self.collected)

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: a turn, or a whole conversation, whose last prompt holds all before."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens

    @property
    def rows(self) -> Between:
        """Rows of an update of A: turns, or conversations."""
        trajectories = self.on_policy + self.replayed
        return Between(trajectories, trajectories * self._turns_in_rows)

    @property
    def responses_in_row(self) -> int:
        """Response tokens of a row, at most."""
        rollout = self.config.rollout
        if self.config.env.layout == "conversation":
            return min(self.max_turns * rollout.max_response_tokens, self.row_tokens)
        return rollout.max_response_tokens

    @property
    def minibatches(self) -> Between:
        """Mini-batches of a pass over an update's rows, one optimiser step each."""
        optimizer = self.config.optimizer
        if optimizer.minibatch_rows is None:
            return Between(*(min(optimizer.minibatches, rows) for rows in (self.rows.low, self.rows.high)))
        return Between(*(-(-rows // optimizer.minibatch_rows) for rows in (self.rows.low, self.rows.high)))

    @property
    def micro_batch_rows(self) -> int:
        """Rows of the greatest length that one forward pass takes."""
        return max(1, self.config.optimizer.micro_batch_tokens // self.row_tokens)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a forward pass, at most."""
        return max(self.config.optimizer.micro_batch_tokens, self.row_tokens)

    @property
    def micro_batches(self) -> int:
        """Forward passes of each process for the largest mini-batch, its rows of the greatest length."""
        rows = -(-self.rows.high // self.minibatches.high)
        rows = -(-rows // (self.config.parallel.processes or 1))
        return -(-rows // self.micro_batch_rows)

    @property
    def tokens(self) -> int:
        """Tokens of an update of A, prompts included, at most."""
        return self.rows.high * self.row_tokens

    @property
    def response_tokens(self) -> int:
        """Response tokens of an update of A, at most."""
        return self.rows.high * self.responses_in_row

    @property
    def _turns_in_rows(self) -> int:
        return 1 if self.config.env.layout == "conversation" else self.max_turns


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one update of A with its share of B's work, at most: every episode as long as it may
    be. 2·P a token for a forward pass of P weights and twice that for a backward pass; attention, which grows with the
    length of a row, is not in it.

    training: the passes with a gradient.  scoring: passes without: old and reference log-probs, the critic's values.
    generation: reading each turn's prompt and writing its response.
    """

    training: float
    scoring: float
    generation: float

    @classmethod
    def of(cls, work: Workload, shape: ModelShape, *, checkpointing: bool, frozen: bool, critic: bool) -> Flops:
        """checkpointing: another forward pass in the backward one.  frozen: LoRA, where the backward pass makes no
        gradient of the model's own weights.  critic: a body of its own."""
        config = work.config
        loop = work.updates_a
        trajectory = work.tokens / (work.on_policy + work.replayed)
        trained = (work.tokens * work.updates_a + work.on_policy * trajectory * work.updates_b) / loop
        sampled = work.sampled * trajectory / loop
        # Without a cache between turns, every turn reads its prompt anew, in a conversation too.
        generated = work.sampled * work.max_turns * work.row_tokens / loop
        forward = 2.0 * shape.parameters
        passes = (2 if frozen else 3) + checkpointing
        critic_size = shape.body_parameters / shape.parameters if critic else 0.0
        training = config.optimizer.epochs * passes * forward * (1.0 + critic_size) * trained
        scored = work.replayed * trajectory  # old log-probs
        scored += trained if config.loss.kl_coef > 0 else 0.0
        scored += sampled if config.rescores else 0.0
        scored += trained * critic_size
        return cls(training, forward * scored, forward * generated)

    @property
    def total(self) -> float:
        """All of it."""
        return self.training + self.scoring + self.generation

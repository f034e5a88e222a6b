"""The optimiser's steps, and the mini-batches that they are made of."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import SCHEDULES, Checks


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and the mini-batches of an update."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    schedule: str = "constant"
    """Learning rate over the run's A-updates, after the warm-up: constant, or falling to 0 linearly or by a cosine.
    Agent B's updates go on from where A's stand, each a place further."""
    warmup_updates: int = 0
    """A-updates over which the learning rate rises from 0."""
    epochs: int = 1
    """Passes of an update over its data."""
    minibatches: int = 4
    """Optimiser steps of a pass."""
    minibatch_rows: int | None = None
    """Rows (turns, or conversations) in a mini-batch; overrides `minibatches`."""
    micro_batch_tokens: int = 16384
    """Tokens in one forward pass, padding included; the gradient does not depend on it."""

    def __post_init__(self) -> None:
        checks = Checks("optimizer", self)
        checks.at_least(0, "learning_rate", "eps", "weight_decay", "warmup_updates")
        checks.positive("grad_clip")
        checks.one_of(SCHEDULES, "schedule")
        checks.at_least(1, "epochs", "minibatches", "micro_batch_tokens")
        checks.at_least(1, "minibatch_rows", or_none=True)
        checks.betas()

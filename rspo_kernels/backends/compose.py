"""The policy loss from logits out of a backend's pieces: log-probs, loss and the gradient of the logits in turn.

The logits are read twice and their gradient is written once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import PolicyLossConfig
from .common import LogitsTransform, RatioSegments


def logits_policy_loss(
    impl: Any,
    logits: Tensor,
    targets: Tensor,
    partners: tuple[Any, ...],
    segments: RatioSegments | None,
    transform: LogitsTransform,
    config: PolicyLossConfig,
    with_entropy: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """logits [B, L, V], targets [B, L], partners [B·L] -> loss (0-d), statistics; d loss/d logits goes into out.

    impl: whose log-probs and loss. partners: advantages, advantage_index, mask (required), weights, old_logp,
    behavior_logp, ref_logp. out may be the logits, or None where no gradient is wanted.
    """
    grid = partners[2].view(targets.shape)
    state = impl.token_logprobs_forward(logits, targets, grid, transform, with_entropy)
    entropy = state[1].flatten() if with_entropy else None
    operands: tuple[Any, ...] = (*partners, entropy, segments, config)
    loss, slope, entropy_slope, stats = impl.policy_loss_forward(state[0].flatten(), *operands)
    if out is not None:
        h = entropy_slope.view(targets.shape) if config.entropy_coef != 0 else None
        impl.token_logprobs_backward(slope.view(targets.shape), h, logits, targets, grid, *state, transform, out)
    return loss, stats

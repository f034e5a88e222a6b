"""The policy loss straight from logits: log-probs, loss and the gradient of the logits, one after the other.

The logits are read twice and their gradient is written once, a few rows at a time (see logprobs.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...config import PolicyLossConfig
from ..common import LogitsTransform, RatioSegments
from .logprobs import token_logprobs_backward, token_logprobs_forward
from .policy_loss import policy_loss_forward


def logits_policy_loss(
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

    partners: advantages, advantage_index, mask (required), weights, old_logp, behavior_logp, ref_logp. out may be the
    logits, or None where no gradient is wanted.
    """
    grid = partners[2].view(targets.shape)
    state = token_logprobs_forward(logits, targets, grid, transform, with_entropy)
    entropy = state[1].flatten() if with_entropy else None
    operands: tuple[Any, ...] = (*partners, entropy, segments, config)
    loss, slope, entropy_slope, stats = policy_loss_forward(state[0].flatten(), *operands)
    if out is not None:
        h = entropy_slope.view(targets.shape) if config.entropy_coef != 0 else None
        token_logprobs_backward(slope.view(targets.shape), h, logits, targets, grid, *state, transform, out)
    return loss, stats

"""The policy loss from logits out of a backend's pieces: log-probs, loss and the gradient of the logits in turn.

The logits are read twice and their gradient is written once. A backend may have functions of the same names that do it
in one kernel.
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


def loss_rows_(
    impl: Any,
    logits: Tensor,
    targets: Tensor,
    partners: tuple[Any, ...],
    transform: LogitsTransform,
    config: PolicyLossConfig,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite logits [B, L, V] by the gradient of the loss, for ratios of single tokens.

    Arguments as in logits_policy_loss. Returns logp, entropy (or empty), and which rows have a gradient, [B·L] each.
    """
    if hasattr(impl, "loss_rows_"):
        return impl.loss_rows_(logits, targets, partners, transform, config, with_entropy)
    grid = partners[2].view(targets.shape)
    state = impl.token_logprobs_forward(logits, targets, grid, transform, with_entropy)
    logp, entropy = state[0].flatten(), state[1].flatten()
    operands: tuple[Any, ...] = (*partners, entropy if with_entropy else None, None, config)
    _, slope, entropy_slope, _ = impl.policy_loss_forward(logp, *operands)
    moved, h = slope != 0, None
    if config.entropy_coef != 0:
        moved, h = moved | (entropy_slope != 0), entropy_slope.view(targets.shape)
    impl.token_logprobs_backward(slope.view(targets.shape), h, logits, targets, grid, *state, transform, logits)
    return logp, entropy, moved

"""Discounted sums within segments, and whitening: vectorised over time, in float64 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import ScanLayout, compute_dtype


def gae(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    layout: ScanLayout,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """rewards, values, mask [N], bootstrap [segments] -> advantages, returns [N]; values None: discounted sums only.

    Masked tokens are left out before anything else, so that the token after the next one is the next entry.
    """
    dtype = compute_dtype(rewards.dtype if values is None else torch.promote_types(rewards.dtype, values.dtype))
    segment = layout.token_segment(rewards)
    place = torch.arange(rewards.numel(), device=rewards.device) if layout.order is None else layout.order
    if mask is not None:
        kept = mask[place]
        segment, place = segment[kept], place[kept]

    sums = rewards[place].double()
    if values is not None:
        v = values[place].double()
        following = torch.zeros_like(v) if bootstrap is None else bootstrap.double()[segment]
        following[:-1] = torch.where(segment[1:] == segment[:-1], v[1:], following[:-1])
        sums = sums - v + gamma * following
    sums = _discounted_sums(sums, segment, gamma if values is None else gamma * lam)

    advantages = rewards.new_zeros(rewards.numel(), dtype=dtype)
    advantages[place] = sums.to(dtype)
    if values is None:
        return advantages, rewards.new_empty(0, dtype=dtype)
    returns = torch.zeros_like(advantages)
    returns[place] = (sums + v).to(dtype)
    return advantages, returns


def discounted_returns(rewards: Tensor, mask: Tensor | None, layout: ScanLayout, gamma: float) -> Tensor:
    """rewards, mask [N] -> discounted sums of what follows within the segment [N]."""
    return gae(rewards, None, mask, None, layout, gamma, 1.0)[0]


def _discounted_sums(x: Tensor, segment: Tensor, decay: float) -> Tensor:
    """Σ_k decay^k·x[t + k] within the segment, by doubling: after pass i the sums reach over 2^i entries."""
    step = 1
    while step < x.numel() and decay != 0.0:
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        x = torch.cat([x[:-step] + torch.where(same, decay * x[step:], 0.0), x[-step:]])
        step, decay = 2 * step, decay * decay
    return x


def masked_whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float) -> Tensor:
    """x, mask [n] -> (x - mean)·rsqrt(var + eps), plus the mean without shift_mean; 0 where masked [n]."""
    dtype = compute_dtype(x.dtype)
    kept = x.double() if mask is None else x[mask].double()
    if kept.numel() == 0:
        return torch.zeros_like(x, dtype=dtype)
    shifted = kept - kept[0]  # identical entries become exactly 0
    centered = shifted - shifted.mean()
    variance = centered.square().sum() / max(kept.numel() - 1, 1)
    white = centered * torch.rsqrt(variance + eps)
    if not shift_mean:
        white = white + (kept[0] + shifted.mean())
    if mask is None:
        return white.to(dtype)
    return torch.zeros_like(x, dtype=dtype).masked_scatter(mask, white.to(dtype))

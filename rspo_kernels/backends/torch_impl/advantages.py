"""Advantages from rewards, in float64 inside: batches of rewards are small."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import ScanLayout, compute_dtype, index_sums
from .scans import discounted_returns


def group_advantages(
    rewards: Tensor, groups: Tensor, baseline: str, scale: str | None, singleton: str, eps: float
) -> Tensor:
    """rewards [n], groups int [n] -> advantages [n], in float64 inside."""
    n = rewards.numel()
    order = torch.argsort(groups, stable=True)
    r, ids = rewards[order].double(), groups[order]
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    slot = starts.cumsum(0) - 1
    # Sums over groups go into n slots, enough for any number of groups: no size depends on the data.
    first = torch.zeros_like(r).index_put((slot[starts],), r[starts])
    size = index_sums(torch.ones_like(r), slot, n)[slot]
    shifted = r - first[slot]
    centered = shifted - index_sums(shifted, slot, n)[slot] / size
    others = (size - 1).clamp(min=1)
    result = centered * size / others if baseline == "leave_one_out" else centered
    if scale == "std":
        square_sum = index_sums(centered.square(), slot, n)[slot]
        result = result / ((square_sum / others).sqrt() + eps)
    result = torch.where(size == 1, r if singleton == "raw" else torch.zeros_like(r), result)
    out = torch.empty_like(r)
    out[order] = result
    return out.to(compute_dtype(rewards.dtype)) if n else rewards.new_zeros(0, dtype=compute_dtype(rewards.dtype))


def step_advantages(
    step_rewards: Tensor,
    groups: Tensor,
    trajectories: Tensor,
    anchors: Tensor,
    valid: Tensor | None,
    penalties: Tensor | None,
    episode_rewards: Tensor | None,
    gamma: float,
    step_weight: float,
    mode: str,
    rows: bool,
    singleton: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All inputs [T] -> joint, episode and step advantages, discounted returns [T]."""
    n = step_rewards.numel()
    turns = torch.arange(n, device=step_rewards.device) if valid is None else valid.nonzero().flatten()
    reward, group = step_rewards[turns].double(), groups[turns]
    penalty = torch.zeros_like(reward) if penalties is None else penalties[turns].double()
    scale = "std" if mode == "mean_std_norm" else None

    trajectory, sizes = _pairs(group, trajectories[turns]).unique(return_inverse=True, return_counts=True)[1:]
    order = torch.argsort(trajectory, stable=True)
    ends = sizes.cumsum(0)
    layout = ScanLayout(order, torch.cat([ends.new_zeros(1), ends]), 0)
    returns = discounted_returns(reward, None, layout, gamma) - penalty
    first = order[ends - sizes]
    if episode_rewards is None:
        total = discounted_returns(reward, None, layout, 1.0)[first]
    else:
        total = episode_rewards[turns][first].double()

    if rows:
        episode = group_advantages(total[trajectory] - penalty, group, "mean", scale, singleton, eps)
    else:
        episode = group_advantages(total, group[first], "mean", scale, singleton, eps)[trajectory] - penalty
    step = group_advantages(returns, _pairs(group, anchors[turns]), "mean", scale, "zero", eps)

    def in_place(x: Tensor) -> Tensor:
        dtype = compute_dtype(step_rewards.dtype)
        return torch.zeros(n, dtype=dtype, device=x.device).index_copy(0, turns, x.to(dtype))

    return in_place(episode + step_weight * step), in_place(episode), in_place(step), in_place(returns)


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """One id for each pair of ids, whatever their range."""
    return a.unique(return_inverse=True)[1] * b.numel() + b.unique(return_inverse=True)[1]

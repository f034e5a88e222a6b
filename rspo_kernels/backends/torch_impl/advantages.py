"""Advantages from rewards, in float64 inside: batches of rewards are small."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import compute_dtype


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
    size = torch.zeros_like(r).index_add(0, slot, torch.ones_like(r))[slot]
    shifted = r - first[slot]
    centered = shifted - torch.zeros_like(r).index_add(0, slot, shifted)[slot] / size
    others = (size - 1).clamp(min=1)
    result = centered * size / others if baseline == "leave_one_out" else centered
    if scale == "std":
        square_sum = torch.zeros_like(r).index_add(0, slot, centered.square())[slot]
        result = result / ((square_sum / others).sqrt() + eps)
    result = torch.where(size == 1, r if singleton == "raw" else torch.zeros_like(r), result)
    out = torch.empty_like(r)
    out[order] = result
    return out.to(compute_dtype(rewards.dtype)) if n else rewards.new_zeros(0, dtype=compute_dtype(rewards.dtype))

"""Operators of the advantages; they have no gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import implementation, resolve
from ..common import compute_dtype
from .registry import define


def _group_advantages(
    rewards: Tensor,
    groups: Tensor,
    baseline: str,
    scale: str | None,
    singleton: str,
    eps: float,
    validate: bool,
    backend: str,
) -> Tensor:
    if validate and not bool(rewards.isfinite().all()):
        i = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards must be finite, got {float(rewards[i])} at position {i} (group {int(groups[i])})")
    impl = implementation(resolve(backend, rewards.device, rewards.dtype))
    return impl.group_advantages(rewards, groups, baseline, scale, singleton, eps)


def _group_advantages_fake(rewards: Tensor, *_: Any) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype))


define(
    "group_advantages",
    "(Tensor rewards, Tensor groups, str baseline, str? scale, str singleton, float eps, bool validate, str backend) "
    "-> Tensor",
    _group_advantages,
    _group_advantages_fake,
)

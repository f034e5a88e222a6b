"""Operators of the discounted sums and of whitening; they have no gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import implementation, resolve
from ..common import ScanLayout, compute_dtype
from .registry import define

_LAYOUT_SCHEMA = "Tensor? order, Tensor? cu, SymInt length"

# gae


def _gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    order: Tensor | None,
    cu: Tensor | None,
    length: int,
    gamma: float,
    lam: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    impl = implementation(resolve(backend, rewards.device, torch.promote_types(rewards.dtype, values.dtype)))
    return impl.gae(rewards, values, mask, bootstrap, ScanLayout(order, cu, length), gamma, lam)


def _gae_fake(rewards: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(torch.promote_types(rewards.dtype, values.dtype))
    return rewards.new_empty(rewards.shape, dtype=dtype), rewards.new_empty(rewards.shape, dtype=dtype)


define(
    "gae",
    f"(Tensor rewards, Tensor values, Tensor? mask, Tensor? bootstrap, {_LAYOUT_SCHEMA}, float gamma, float lam, "
    "str backend) -> (Tensor advantages, Tensor returns)",
    _gae,
    _gae_fake,
)

# discounted_returns


def _discounted_returns(
    rewards: Tensor,
    mask: Tensor | None,
    order: Tensor | None,
    cu: Tensor | None,
    length: int,
    gamma: float,
    backend: str,
) -> Tensor:
    impl = implementation(resolve(backend, rewards.device, rewards.dtype))
    return impl.discounted_returns(rewards, mask, ScanLayout(order, cu, length), gamma)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=compute_dtype(x.dtype))


define(
    "discounted_returns",
    f"(Tensor rewards, Tensor? mask, {_LAYOUT_SCHEMA}, float gamma, str backend) -> Tensor",
    _discounted_returns,
    _like,
)

# masked_whiten


def _masked_whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, backend: str) -> Tensor:
    return implementation(resolve(backend, x.device, x.dtype)).masked_whiten(x, mask, shift_mean, eps)


define(
    "masked_whiten",
    "(Tensor x, Tensor? mask, bool shift_mean, float eps, str backend) -> Tensor",
    _masked_whiten,
    _like,
)

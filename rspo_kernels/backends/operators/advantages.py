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


# step_advantages


def _check_finite(name: str, x: Tensor, valid: Tensor | None, groups: Tensor, trajectories: Tensor) -> None:
    wrong = ~x.isfinite() if valid is None else ~x.isfinite() & valid
    if wrong.any():
        i = int(wrong.nonzero()[0])
        where = f"position {i} (group {int(groups[i])}, trajectory {int(trajectories[i])})"
        raise ValueError(f"{name} must be finite, got {float(x[i])} at {where}")


def _step_advantages(
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
    validate: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = {"step_rewards": step_rewards, "penalties": penalties, "episode_rewards": episode_rewards}
    for name, x in numbers.items():
        if validate and x is not None:
            _check_finite(name, x, valid, groups, trajectories)
    impl = implementation(resolve(backend, step_rewards.device, step_rewards.dtype))
    return impl.step_advantages(
        step_rewards, groups, trajectories, anchors, valid, penalties, episode_rewards,
        gamma, step_weight, mode, rows, singleton, eps,
    )  # fmt: skip


def _step_advantages_fake(step_rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(step_rewards.dtype)
    joint, episode, step, returns = (step_rewards.new_empty(step_rewards.shape, dtype=dtype) for _ in range(4))
    return joint, episode, step, returns


define(
    "step_advantages",
    "(Tensor step_rewards, Tensor groups, Tensor trajectories, Tensor anchors, Tensor? valid, Tensor? penalties, "
    "Tensor? episode_rewards, float gamma, float step_weight, str mode, bool rows, str singleton, float eps, "
    "bool validate, str backend) -> (Tensor joint, Tensor episode, Tensor step, Tensor returns)",
    _step_advantages,
    _step_advantages_fake,
)

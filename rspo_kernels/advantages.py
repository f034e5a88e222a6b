"""Advantages from rewards."""

from __future__ import annotations

from torch import Tensor

from . import checks
from .backends import BACKENDS
from .backends.operators import ops

BASELINES = ("mean", "leave_one_out")
SCALES = ("std", None)
SINGLETONS = ("zero", "raw")


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: str = "mean",
    scale: str | None = "std",
    singleton: str = "zero",
    eps: float = 1e-6,
    validate: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Advantages of trajectories over their group: GRPO (mean, std), Dr. GRPO (mean, None), RLOO (leave_one_out, None).

        mean:          R_i - mean(R of the group)
        leave_one_out: R_i - mean(R of the others) = n/(n - 1)·(R_i - mean)
        std:           divided by the group's standard deviation (Bessel-corrected) + eps

    Args:
        rewards: [n] float, one for each trajectory (or row).
        groups: [n] int32 or int64, any ids in any order; groups may differ in size.
        singleton: a group of one gets 0 ("zero") or its reward ("raw", as verl does).
        validate: check that rewards are finite (a host synchronisation on accelerators).

    Returns:
        [n] float32 (float64 for float64 rewards). Identical rewards in a group give exactly 0.

    Raises:
        TypeError, ValueError: a wrong argument, named; a reward that is not finite, with its position.
    """
    checks.floating("rewards", rewards)
    checks.integer("groups", groups)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [n], got {list(rewards.shape)}")
    checks.same_shape("groups", groups, rewards.shape, "rewards")
    checks.same_device("groups", groups, rewards.device, "rewards")
    checks.one_of("baseline", baseline, BASELINES)
    checks.one_of("scale", scale, SCALES)
    checks.one_of("singleton", singleton, SINGLETONS)
    checks.one_of("backend", backend, BACKENDS)
    eps = checks.positive("eps", eps)
    return ops.group_advantages(rewards.detach(), groups, baseline, scale, singleton, eps, validate, backend)

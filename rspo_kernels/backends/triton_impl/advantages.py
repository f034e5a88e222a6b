"""Group-relative advantages in one launch: rewards in groups of any size, in any order.

    A_i = (R_i - mean of its group)/(std of its group + eps)      leave_one_out: R_i - mean of the others

Each program owns some rewards and streams over all n three times (the group's first member and size; its sum and
largest deviation; its squares): n² comparisons but no sorting, no second launch and no host synchronisation. At the
128 to 1024 rewards of a batch that is less than the launch.

Memory: (n/ROWS)·(2n + 1) words, from cache.

Numerics: float32. Deviations are taken from the group's first member and only then from their mean, so that
identical rewards give exactly 0 and rewards of 1000 ± 0.01 keep their digits. The variance is two-pass and computed
in units of the largest deviation, and everything from rewards times HEADROOM: those of ±3e38 do not overflow inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import HEADROOM, Variant, launch_options, on_device

ROWS = 16
COLS = 256
THREADS = 128


@triton.jit
def same_group(p_groups, b_group, start, n, COLS: tl.constexpr):
    """Indices of the next COLS members, and which of them share a group with each of b_group [ROWS]."""
    o_j = start + tl.arange(0, COLS)
    b_other = tl.load(p_groups + o_j, mask=o_j < n, other=0)
    return o_j, (b_group[:, None] == b_other[None, :]) & (o_j < n)[None, :]


@triton.jit
def against_group(
    p_rewards, p_groups, b_reward, b_group, b_inside, n, eps,
    SCALE: tl.constexpr, STD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Each of b_reward [ROWS] less its group's mean (and divided by std + eps), and the size of its group.

    b_reward and eps are multiplied by SCALE already, and so is the result without STD; p_rewards is not.
    """
    b_first = tl.full([ROWS], 2147483647, tl.int32)
    b_size = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, COLS):
        o_j, b_same = same_group(p_groups, b_group, start, n, COLS)
        b_first = tl.minimum(b_first, tl.min(tl.where(b_same, o_j[None, :], 2147483647), 1))
        b_size += tl.sum(tl.where(b_same, 1.0, 0.0), 1)
    b_origin = tl.load(p_rewards + b_first, mask=b_inside, other=0.0).to(tl.float32) * SCALE

    b_sum = tl.zeros([ROWS], tl.float32)
    b_peak = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, COLS):
        o_j, b_same = same_group(p_groups, b_group, start, n, COLS)
        b_other = tl.load(p_rewards + o_j, mask=o_j < n, other=0.0).to(tl.float32)
        b_other *= SCALE
        b_d = tl.where(b_same, b_other[None, :] - b_origin[:, None], 0.0)
        b_sum += tl.sum(b_d, 1)
        b_peak = tl.maximum(b_peak, tl.max(tl.abs(b_d), 1))
    b_mean = b_sum / tl.maximum(b_size, 1.0)
    b_advantage = (b_reward - b_origin) - b_mean

    if STD:
        b_unit = tl.where(b_peak > 0.0, b_peak, 1.0)
        b_square = tl.zeros([ROWS], tl.float32)
        for start in range(0, n, COLS):
            o_j, b_same = same_group(p_groups, b_group, start, n, COLS)
            b_other = tl.load(p_rewards + o_j, mask=o_j < n, other=0.0).to(tl.float32)
            b_other *= SCALE
            b_d = ((b_other[None, :] - b_origin[:, None]) - b_mean[:, None]) / b_unit[:, None]
            b_square += tl.sum(tl.where(b_same, b_d * b_d, 0.0), 1)
        b_std = tl.sqrt(b_square / tl.maximum(b_size - 1.0, 1.0)) * b_unit + eps
        b_advantage = b_advantage / tl.where(b_std > 0.0, b_std, 1.0)
    return b_advantage, b_size


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p_rewards", "p_groups"])
def group_advantages_kernel(
    p_rewards, p_groups, p_out, n, eps,
    LEAVE_ONE_OUT: tl.constexpr, STD: tl.constexpr, RAW_SINGLETON: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    o_i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_inside = o_i < n
    b_group = tl.load(p_groups + o_i, mask=b_inside, other=0)
    b_reward = tl.load(p_rewards + o_i, mask=b_inside, other=0.0).to(tl.float32)
    b_advantage, b_size = against_group(
        p_rewards, p_groups, b_reward * HEADROOM, b_group, b_inside, n, eps * HEADROOM, HEADROOM, STD, ROWS, COLS
    )
    if LEAVE_ONE_OUT:
        b_advantage *= b_size / tl.maximum(b_size - 1.0, 1.0)
    if not STD:
        b_advantage *= 1.0 / HEADROOM
    b_alone = b_reward if RAW_SINGLETON else tl.zeros([ROWS], tl.float32)
    tl.store(p_out + o_i, tl.where(b_size == 1.0, b_alone, b_advantage), mask=b_inside)


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    baseline: str,
    scale: str | None,
    singleton: str,
    eps: float,
    *,
    rows: int = ROWS,
    cols: int = COLS,
) -> Tensor:
    """rewards [n], groups int64 [n] -> advantages float32 [n]."""
    n = rewards.numel()
    out = rewards.new_empty(n, dtype=torch.float32)
    if n == 0:
        return out
    with on_device(rewards):
        group_advantages_kernel[(triton.cdiv(n, rows),)](
            rewards.contiguous(), groups.contiguous(), out, n, float(eps),
            LEAVE_ONE_OUT=baseline == "leave_one_out", STD=scale == "std", RAW_SINGLETON=singleton == "raw",
            ROWS=rows, COLS=cols, **launch_options(THREADS),
        )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    """For compile_check: the least and the most that it computes."""
    types = {"p_rewards": "*fp32", "p_groups": "*i64", "p_out": "*fp32", "n": "i32", "eps": "fp32"}
    for name, std in (("mean", False), ("leave-one-out, std", True)):
        constants = {"LEAVE_ONE_OUT": std, "STD": std, "RAW_SINGLETON": std, "ROWS": ROWS, "COLS": COLS}
        # For each pair of rewards; a program reads the others once for its ROWS.
        reads = (8 / ROWS, 12 / ROWS)
        yield Variant(group_advantages_kernel, name, types, constants, THREADS, reads=reads)

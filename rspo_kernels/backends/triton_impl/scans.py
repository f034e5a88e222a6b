"""Generalized advantage estimation and discounted returns: one launch, one program for each segment.

    A_t = (r_t - V_t) + γ·V_next + γλ·A_next      returns_t = A_t + V_t

`next` is the next unmasked token of the segment; after the last one V is the bootstrap value and A is 0. Without
values the same recursion gives discounted returns: G_t = r_t + γ·G_next.

Each token maps the state (V_next, A_next) behind it to the state (V, A) before it. That map is affine, so a block is
one reverse associative scan over maps, and only the state travels from block to block:

    V = keep·V_next + value      A = slope·V_next + decay·A_next + shift
    unmasked token: keep = 0, value = V_t, slope = γ, decay = γλ, shift = r_t - V_t;  masked token: the identity

Memory: every input is read once, each output written once; masked tokens are not read. An `order` is followed inside
the kernel: turns that were shuffled are neither gathered before nor scattered after.

Numerics: float32; relative to the largest advantage of a segment the error is that of a few roundings (1e-6). Rewards
and values are taken times HEADROOM, so that those of ±3e38 overflow only where the result does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import ScanLayout
from .common import HEADROOM, Variant, f32, launch_options, on_device

BLOCK = 1024
THREADS = 128

INPUTS = ("p_rewards", "p_values", "p_mask", "p_order", "p_cu", "p_bootstrap")


@triton.jit
def compose(later_keep, later_value, later_slope, later_decay, later_shift, keep, value, slope, decay, shift):
    """The map of later tokens, then that of an earlier one."""
    return (
        keep * later_keep,
        keep * later_value + value,
        slope * later_keep + decay * later_slope,
        decay * later_decay,
        slope * later_value + decay * later_shift + shift,
    )


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=INPUTS)
def gae_kernel(
    p_rewards, p_values, p_mask, p_order, p_cu, p_bootstrap, p_advantages, p_returns,
    length, gamma, lam,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i_segment = tl.program_id(0).to(tl.int64)
    gamma, lam = f32(gamma), f32(lam)
    if p_cu is not None:
        start = tl.load(p_cu + i_segment).to(tl.int64)
        end = tl.load(p_cu + i_segment + 1).to(tl.int64)
    else:
        start = i_segment * length
        end = start + length
    next_value = f32(0.0)
    if p_bootstrap is not None:
        next_value = tl.load(p_bootstrap + i_segment).to(tl.float32) * HEADROOM
    next_advantage = f32(0.0)

    o_first = tl.arange(0, BLOCK)
    n_blocks = tl.cdiv(end - start, BLOCK)
    for i_block in range(0, n_blocks):
        o_t = start + (n_blocks - 1 - i_block) * BLOCK + o_first
        b_inside = o_t < end
        if p_order is not None:
            o_t = tl.load(p_order + o_t, mask=b_inside, other=0).to(tl.int64)
        b_keep = b_inside
        if p_mask is not None:
            b_keep = b_keep & (tl.load(p_mask + o_t, mask=b_inside, other=0) != 0)
        b_reward = tl.load(p_rewards + o_t, mask=b_keep, other=0.0).to(tl.float32) * HEADROOM
        b_value = tl.zeros([BLOCK], tl.float32)
        if p_values is not None:
            b_value = tl.load(p_values + o_t, mask=b_keep, other=0.0).to(tl.float32) * HEADROOM

        b_pass, b_given, b_slope, b_decay, b_shift = tl.associative_scan(
            (
                tl.where(b_keep, 0.0, 1.0),
                b_value,
                tl.where(b_keep, gamma, 0.0),
                tl.where(b_keep, gamma * lam, 1.0),
                b_reward - b_value,
            ),
            0,
            compose,
            reverse=True,
        )
        b_advantage = b_slope * next_value + b_decay * next_advantage + b_shift
        tl.store(p_advantages + o_t, tl.where(b_keep, b_advantage * (1.0 / HEADROOM), 0.0), mask=b_inside)
        if p_values is not None:
            tl.store(p_returns + o_t, tl.where(b_keep, (b_advantage + b_value) * (1.0 / HEADROOM), 0.0), mask=b_inside)
        next_advantage = tl.sum(tl.where(o_first == 0, b_advantage, 0.0), 0)
        next_value = tl.sum(tl.where(o_first == 0, b_pass * next_value + b_given, 0.0), 0)


def gae(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    layout: ScanLayout,
    gamma: float,
    lam: float,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """rewards, values, mask [N], bootstrap [segments] -> advantages, returns float32 [N]; values None: no returns."""
    n = rewards.numel()
    advantages = rewards.new_empty(n, dtype=torch.float32)
    returns = rewards.new_empty(0 if values is None else n, dtype=torch.float32)
    if n == 0:
        return advantages, returns
    inputs = (rewards, values, mask, layout.order, layout.cu, bootstrap)
    with on_device(rewards):
        gae_kernel[(layout.count(n),)](
            *(None if x is None else x.contiguous() for x in inputs), advantages, returns,
            layout.length, float(gamma), float(lam), BLOCK=block or BLOCK, **launch_options(THREADS),
        )  # fmt: skip
    return advantages, returns


def discounted_returns(rewards: Tensor, mask: Tensor | None, layout: ScanLayout, gamma: float) -> Tensor:
    """rewards, mask [N] -> discounted sums of what follows within the segment, float32 [N]."""
    return gae(rewards, None, mask, None, layout, gamma, 1.0)[0]


def variants() -> Iterator[Variant]:
    """For compile_check: discounted returns of rows, and advantages with everything that can be given."""
    special = {"p_mask": "*i1", "p_order": "*i64", "p_cu": "*i64"}
    fixed = {"p_advantages": "*fp32", "p_returns": "*fp32", "length": "i32", "gamma": "fp32", "lam": "fp32"}
    for name, given in (("returns of rows", ("p_rewards",)), ("full", INPUTS)):
        types = fixed | {n: special.get(n, "*fp32") for n in given}
        constants: dict[str, object] = dict.fromkeys(n for n in INPUTS if n not in given) | {"BLOCK": BLOCK}
        reads = sum({"*i1": 1, "*i64": 8, "*fp32": 4}[types[n]] for n in given if n not in ("p_cu", "p_bootstrap"))
        yield Variant(gae_kernel, name, types, constants, THREADS, reads=(reads,))

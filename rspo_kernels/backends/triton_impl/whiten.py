"""Masked whitening in one launch.

    out_i = (x_i - mean)·rsqrt(var + eps)      over the unmasked entries; 0 where masked

Whoever writes needs the mean and variance of everything, and a launch has no barrier across programs. So each of at
most PROGRAMS programs streams over all of x for itself (its first unmasked entry; sum; squares), in cache after the
first, and then writes its own share: no atomics, no counter to clear, the same bits in every run. More programs would
shorten the share but not the streams.

Memory: PROGRAMS·2n words from cache, n written.

Numerics: float32. Deviations are taken from the first unmasked entry and only then from their mean, so that identical
entries give exactly 0 and values of 1000 ± 0.01 keep their digits. The variance is two-pass, in units of the largest
deviation where that is above 1, and everything from values times HEADROOM: those of ±3e38 do not overflow inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import HEADROOM, Variant, f32, launch_options, on_device

BLOCK = 4096
PROGRAMS = 16
THREADS = 512


@triton.jit
def load_kept(p_x, p_mask, i_block, n, BLOCK: tl.constexpr):
    """The offsets of a block, which of them are unmasked, and HEADROOM times the entries there (0 elsewhere)."""
    o_x = i_block * BLOCK + tl.arange(0, BLOCK)
    b_keep = o_x < n
    if p_mask is not None:
        b_keep = b_keep & (tl.load(p_mask + o_x, mask=b_keep, other=0) != 0)
    return o_x, b_keep, tl.load(p_x + o_x, mask=b_keep, other=0.0).to(tl.float32) * HEADROOM


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p_x", "p_mask"])
def masked_whiten_kernel(p_x, p_mask, p_out, n, eps, SHIFT_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    n_blocks = tl.cdiv(n, BLOCK)

    origin = f32(0.0)
    found = 0
    i_next = tl.full([], 0, tl.int64)
    while (found == 0) & (i_next < n_blocks):
        o_x, b_keep, b_x = load_kept(p_x, p_mask, i_next, n, BLOCK)
        o_first = tl.min(tl.where(b_keep, o_x, n), 0)
        origin = tl.sum(tl.where(o_x == o_first, b_x, 0.0), 0)
        found = tl.max(b_keep.to(tl.int32), 0)
        i_next += 1

    b_count = tl.zeros([BLOCK], tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_peak = tl.zeros([BLOCK], tl.float32)
    for i_block in range(0, n_blocks):
        _, b_keep, b_x = load_kept(p_x, p_mask, i_block, n, BLOCK)
        b_d = tl.where(b_keep, b_x - origin, 0.0)
        b_count += tl.where(b_keep, 1.0, 0.0)
        b_sum += b_d
        b_peak = tl.maximum(b_peak, tl.abs(b_d))
    count = tl.sum(b_count, 0)
    unit = tl.maximum(tl.max(b_peak, 0), HEADROOM)
    mean = tl.sum(b_sum, 0) / tl.maximum(count, 1.0)

    b_square = tl.zeros([BLOCK], tl.float32)
    for i_block in range(0, n_blocks):
        _, b_keep, b_x = load_kept(p_x, p_mask, i_block, n, BLOCK)
        b_d = tl.where(b_keep, ((b_x - origin) - mean) / unit, 0.0)
        b_square += b_d * b_d
    variance = tl.sum(b_square, 0) / tl.maximum(count - 1.0, 1.0)
    one = HEADROOM / unit
    scale = unit * tl.sqrt(variance + f32(eps) * one * one)
    scale = tl.where(scale > 0.0, scale, 1.0)

    for i_block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        o_x, b_keep, b_x = load_kept(p_x, p_mask, i_block, n, BLOCK)
        b_white = ((b_x - origin) - mean) / scale
        if not SHIFT_MEAN:
            b_white += (origin + mean) * (1.0 / HEADROOM)
        tl.store(p_out + o_x, tl.where(b_keep, b_white, 0.0), mask=o_x < n)


def masked_whiten(x: Tensor, mask: Tensor | None, shift_mean: bool, eps: float, *, block: int | None = None) -> Tensor:
    """x, mask [n] -> whitened float32 [n]."""
    n = x.numel()
    out = x.new_empty(n, dtype=torch.float32)
    if n == 0:
        return out
    block = block or BLOCK
    with on_device(x):
        masked_whiten_kernel[(min(PROGRAMS, triton.cdiv(n, block)),)](
            x.contiguous(), None if mask is None else mask.contiguous(), out, n, float(eps),
            SHIFT_MEAN=shift_mean, BLOCK=block, **launch_options(THREADS),
        )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    """For compile_check: without and with a mask."""
    types = {"p_x": "*fp32", "p_mask": "*i1", "p_out": "*fp32", "n": "i32", "eps": "fp32"}
    for name, absent in (("plain", {"p_mask": None}), ("masked", {})):
        constants = absent | {"SHIFT_MEAN": not absent, "BLOCK": BLOCK}
        reads = (4.0 if absent else 5.0,)
        yield Variant(masked_whiten_kernel, name, types, constants, THREADS, reads=reads)

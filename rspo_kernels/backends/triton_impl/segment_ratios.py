"""Ratios of segments: log-ratios summed over the tokens of a turn, sequence or set, and their gradient back to tokens.

    log r_s = Σ share_t·(logp_t - behavior_t)       log c_s = Σ share_t·(old_t - behavior_t)      over t in s
    d loss/d logp_t += share_t·Σ_s w·d loss/d log r

One program walks over the tokens of one segment, in the order of a stable sort by segment: tokens of a segment may
stand anywhere, sums have a fixed order (no atomics, the same bits in every run), and no size is read on the host.

Memory: each vector is read once, by index; tokens with a share of 0 (masked) are not read. Numerics: float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import RatioSegments
from .common import Variant, launch_options, on_device

BLOCK = 512
THREADS = 128

LOWEST_LOGP = tl.constexpr(-1e30)
"""Stands for -inf in differences of log-probs, where (-inf) - (-inf) must be 0."""

UNALIGNED = ("p_logp", "p_old", "p_behavior", "p_share")


@triton.jit
def at_least_lowest(b_logp):
    """Log-probs bounded by LOWEST_LOGP; NaN stays NaN, which the hardware's max would drop."""
    return tl.maximum(b_logp, LOWEST_LOGP, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_logp(p_x, o_x, b_keep):
    """Log-probs of kept tokens, bounded; 0 for the others."""
    return at_least_lowest(tl.load(p_x + o_x, mask=b_keep, other=0.0).to(tl.float32))


@triton.jit
def members(p_order, p_share, begin, end, BLOCK: tl.constexpr):
    """The next tokens of a segment, whether there are as many and they count, and their shares."""
    o_m = begin + tl.arange(0, BLOCK)
    b_in = o_m < end
    o_t = tl.load(p_order + o_m, mask=b_in, other=0)
    b_share = tl.load(p_share + o_t, mask=b_in, other=0.0).to(tl.float32)
    return o_t, b_share != 0.0, b_share


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def segment_ratios_kernel(
    p_logp, p_old, p_behavior, p_share, p_order, p_offsets, p_log_r, p_log_c, BLOCK: tl.constexpr
):  # fmt: skip
    i_segment = tl.program_id(0)
    begin, end = tl.load(p_offsets + i_segment), tl.load(p_offsets + i_segment + 1)
    b_log_r = tl.zeros([BLOCK], tl.float32)
    b_log_c = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        o_t, b_keep, b_share = members(p_order, p_share, start, end, BLOCK)
        b_new = load_logp(p_logp, o_t, b_keep)
        b_old = b_new
        if p_old is not None:
            b_old = load_logp(p_old, o_t, b_keep)
        b_behavior = b_old
        if p_behavior is not None:
            b_behavior = load_logp(p_behavior, o_t, b_keep)
        b_log_r += b_share * (b_new - b_behavior)
        b_log_c += b_share * (b_old - b_behavior)
    tl.store(p_log_r + i_segment, tl.sum(b_log_r, 0))
    tl.store(p_log_c + i_segment, tl.sum(b_log_c, 0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def segment_gradient_kernel(p_logp, p_shared, p_share, p_order, p_offsets, p_grad, BLOCK: tl.constexpr):
    i_segment = tl.program_id(0)
    begin, end = tl.load(p_offsets + i_segment), tl.load(p_offsets + i_segment + 1)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        o_t, b_keep, _ = members(p_order, p_share, start, end, BLOCK)
        b_sum += tl.load(p_shared + o_t, mask=b_keep, other=0.0)
    total = tl.sum(b_sum, 0)
    for start in range(begin, end, BLOCK):
        o_t, b_keep, b_share = members(p_order, p_share, start, end, BLOCK)
        # A target of probability 0 has no direction to move in.
        b_keep = b_keep & (tl.load(p_logp + o_t, mask=b_keep, other=0.0).to(tl.float32) >= LOWEST_LOGP)
        b_grad = tl.load(p_grad + o_t, mask=b_keep, other=0.0)
        tl.store(p_grad + o_t, b_grad + b_share * total, mask=b_keep)


class Members(NamedTuple):
    """Tokens in the order of their segments: those of segment s are order[offsets[s] : offsets[s + 1]]."""

    order: Tensor
    offsets: Tensor
    share: Tensor

    @classmethod
    def of(cls, segments: RatioSegments) -> Members:
        ids, order = torch.sort(segments.index, stable=True)
        bounds = torch.arange(segments.count + 1, device=ids.device)
        return cls(order, torch.searchsorted(ids, bounds), segments.share.contiguous())

    def log_ratios(self, logp: Tensor, old_logp: Tensor | None, behavior_logp: Tensor | None) -> tuple[Tensor, Tensor]:
        """log r and log c of each segment, from log-probs [N]."""
        count = self.offsets.numel() - 1
        log_r, log_c = (logp.new_empty(count, dtype=torch.float32) for _ in range(2))
        if count:
            with on_device(logp):
                segment_ratios_kernel[(count,)](
                    logp, old_logp, behavior_logp, self.share, self.order, self.offsets, log_r, log_c,
                    BLOCK=BLOCK, **launch_options(THREADS),
                )  # fmt: skip
        return log_r, log_c

    def add_gradient(self, logp: Tensor, shared: Tensor, grad_logp: Tensor) -> None:
        """grad_logp += share·(sum of `shared` over the segment)."""
        count = self.offsets.numel() - 1
        if count:
            with on_device(logp):
                segment_gradient_kernel[(count,)](
                    logp, shared, self.share, self.order, self.offsets, grad_logp,
                    BLOCK=BLOCK, **launch_options(THREADS),
                )  # fmt: skip


def variants() -> Iterator[Variant]:
    """For compile_check."""
    for kernel, reads in ((segment_ratios_kernel, (24,)), (segment_gradient_kernel, (16, 20))):
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"p_order": "*i64", "p_offsets": "*i64"}
        yield Variant(kernel, "fp32", types, {"BLOCK": BLOCK}, THREADS, reads=reads)

"""Log-probs of targets and entropy from logits: one program per row, one read forward, one read and write backward.

With scores y_j = softcap(scale·x_j), maximum M = max_j y_j and the probability p_j of column j:

    log_sum = log Σ_j exp((y_j - M)/T)                 logp = (y_t - M)/T - log_sum
    entropy = log_sum - Σ_j p_j·(y_j - M)/T
    d/dx_j  = slope_j/T·(g·(1[j = t] - p_j) - h·p_j·(log p_j + entropy)),    slope_j = dy_j/dx_j

for upstream gradients g of logp and h of entropy.

Memory: forward reads each valid logit once (and less than one part in a thousand of them twice) and writes 16 bytes
a row. Backward reads and writes each logit once; it may write over the logits, since an element is written by the
thread that read it. Rows that are masked, or whose upstream gradients are 0, read no logits; backward writes zeros.

Numerics: float32; row_softmax.py, which has the work on a row, says how digits are kept.

Compiled by Triton 3.7.1 for sm_90, bf16 (not yet timed on a GPU): forward 59 registers and 8.0 instructions an
element (64 with entropy), backward 44 and 7.0 (64 and 9.9 with entropy), all wide accesses 128 bits, no spills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LogitsTransform
from .common import Variant, f32, launch_options, on_device
from .row_softmax import row_gradient, row_statistics
from .rows import RowTile, scalars, unit_stride

UNSPECIALIZED = (
    "n_tokens", "n_valid", "n_cols", "ignore_index", "stride_xb", "stride_xl", "stride_ob", "stride_ol",
    "stride_tb", "stride_tl", "stride_mb", "stride_ml", "stride_gb", "stride_gl", "stride_hb", "stride_hl",
)  # fmt: skip
"""Sizes and strides change from batch to batch: no recompilation when one happens to be 1 or divisible by 16."""

UNALIGNED = ("p_targets", "p_mask", "p_grad_logp", "p_grad_entropy")
"""Read one element a row: their alignment is worth nothing."""


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def logprobs_forward_kernel(
    p_logits, stride_xb, stride_xl,
    p_targets, stride_tb, stride_tl,
    p_mask, stride_mb, stride_ml,
    p_logp, p_entropy, p_row_max, p_log_sum,
    n_tokens, n_valid, ignore_index,
    pre, cap, k,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pre, cap, k = f32(pre), f32(cap), f32(k)
    i_row = tl.program_id(0)
    i_b = (i_row // n_tokens).to(tl.int64)
    i_l = (i_row % n_tokens).to(tl.int64)
    target = tl.load(p_targets + i_b * stride_tb + i_l * stride_tl).to(tl.int64)
    keep = target != ignore_index
    if p_mask is not None:
        keep = keep & (tl.load(p_mask + i_b * stride_mb + i_l * stride_ml) != 0)
    if not keep:
        tl.store(p_logp + i_row, 0.0)
        tl.store(p_row_max + i_row, 0.0)
        tl.store(p_log_sum + i_row, 0.0)
        if ENTROPY:
            tl.store(p_entropy + i_row, 0.0)
        return

    o_row = i_b * stride_xb + i_l * stride_xl
    logp, entropy, row_max, log_sum = row_statistics(
        p_logits, o_row, target, n_valid, pre, cap, k, ENTROPY, SOFTCAP, VEC, ROWS, LANES
    )
    tl.store(p_logp + i_row, logp)
    tl.store(p_row_max + i_row, row_max)
    tl.store(p_log_sum + i_row, log_sum)
    if ENTROPY:
        tl.store(p_entropy + i_row, entropy)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def logprobs_backward_kernel(
    p_grad_logp, stride_gb, stride_gl,
    p_grad_entropy, stride_hb, stride_hl,
    p_logits, stride_xb, stride_xl,
    p_targets, stride_tb, stride_tl,
    p_mask, stride_mb, stride_ml,
    p_logp, p_entropy, p_row_max, p_log_sum,
    p_out, stride_ob, stride_ol,
    n_tokens, n_valid, n_cols, ignore_index,
    pre, cap, k, factor,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, SAME_PHASE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pre, cap, k, factor = f32(pre), f32(cap), f32(k), f32(factor)
    i_row = tl.program_id(0)
    i_b = (i_row // n_tokens).to(tl.int64)
    i_l = (i_row % n_tokens).to(tl.int64)
    o_out = i_b * stride_ob + i_l * stride_ol
    target = tl.full([], -1, tl.int64)
    keep = target < 0
    if p_targets is not None:
        target = tl.load(p_targets + i_b * stride_tb + i_l * stride_tl).to(tl.int64)
        keep = target != ignore_index
    if p_mask is not None:
        keep = keep & (tl.load(p_mask + i_b * stride_mb + i_l * stride_ml) != 0)
    g = tl.load(p_grad_logp + i_b * stride_gb + i_l * stride_gl).to(tl.float32)
    h = 0.0
    entropy = 0.0
    if ENTROPY:
        h = tl.load(p_grad_entropy + i_b * stride_hb + i_l * stride_hl).to(tl.float32)
        entropy = tl.load(p_entropy + i_row)
    row_gradient(
        p_logits, i_b * stride_xb + i_l * stride_xl, p_out, o_out, keep, target, n_valid, n_cols,
        g, h, tl.load(p_logp + i_row), entropy, tl.load(p_row_max + i_row), tl.load(p_log_sum + i_row),
        pre, cap, k, factor, p_targets is not None, ENTROPY, SOFTCAP, SAME_PHASE, VEC, ROWS, LANES,
    )  # fmt: skip


def token_logprobs_forward(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    transform: LogitsTransform,
    with_entropy: bool,
    *,
    tile: RowTile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [B, L, V], targets [B, L], mask bool [B, L] or None -> logp, entropy (or empty), row_max, log_sum."""
    logits = unit_stride(logits)
    logp, row_max, log_sum = (logits.new_empty(targets.shape, dtype=torch.float32) for _ in range(3))
    entropy = logits.new_empty(targets.shape if with_entropy else 0, dtype=torch.float32)
    if targets.numel() == 0:
        return logp, entropy, row_max, log_sum
    tile = tile or RowTile.choose(transform.valid_vocab, logits.element_size(), transform.softcap is not None)
    mask_strides = mask.stride() if mask is not None else (0, 0)
    pre, cap, k, _ = scalars(transform)
    with on_device(logits):
        logprobs_forward_kernel[(targets.numel(),)](
            logits, *logits.stride()[:2], targets, *targets.stride(), mask, *mask_strides,
            logp, entropy, row_max, log_sum,
            targets.shape[1], transform.valid_vocab, transform.ignore_index, pre, cap, k,
            ENTROPY=with_entropy, SOFTCAP=transform.softcap is not None,
            **tile.constants(), **launch_options(tile.threads),
        )  # fmt: skip
    return logp, entropy, row_max, log_sum


def token_logprobs_backward(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor | None,
    mask: Tensor | None,
    logp: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    transform: LogitsTransform,
    out: Tensor,
    *,
    tile: RowTile | None = None,
) -> None:
    """Write d(loss)/d(logits) into out [B, L, V], which may be the logits themselves.

    Without targets every column is one that was not chosen (the targets' gradients are then written elsewhere).
    """
    if logp.numel() == 0:
        return
    if unit_stride(out) is not out:
        buffer = torch.empty_like(out, memory_format=torch.contiguous_format)
        saved = (logits, targets, mask, logp, entropy, row_max, log_sum)
        token_logprobs_backward(grad_logp, grad_entropy, *saved, transform, buffer, tile=tile)
        out.copy_(buffer)
        return
    logits = unit_stride(logits)
    tile = tile or RowTile.choose(transform.valid_vocab, logits.element_size(), transform.softcap is not None)
    mask_strides = mask.stride() if mask is not None else (0, 0)
    entropy_strides = grad_entropy.stride() if grad_entropy is not None else (0, 0)
    target_strides = targets.stride() if targets is not None else (0, 0)
    statistics = (x.contiguous() for x in (logp, entropy, row_max, log_sum))
    with on_device(logits):
        logprobs_backward_kernel[(logp.numel(),)](
            grad_logp, *grad_logp.stride(), grad_entropy, *entropy_strides, logits, *logits.stride()[:2],
            targets, *target_strides, mask, *mask_strides, *statistics, out, *out.stride()[:2],
            logits.shape[1], transform.valid_vocab, logits.shape[2], transform.ignore_index, *scalars(transform),
            ENTROPY=grad_entropy is not None, SOFTCAP=transform.softcap is not None,
            SAME_PHASE=tile.same_phase(logits, out), **tile.constants(), **launch_options(tile.threads),
        )  # fmt: skip


def variants() -> Iterator[Variant]:
    """For compile_check: both kernels in the dtypes and options that shape their code."""
    options = ({}, {"ENTROPY": True}, {"ENTROPY": True, "SOFTCAP": True})
    for dtype in (torch.bfloat16, torch.float32):
        for option in options:
            yield _variant(logprobs_forward_kernel, dtype, option)
            yield _variant(logprobs_backward_kernel, dtype, option)
    yield _variant(logprobs_backward_kernel, torch.bfloat16, {"ENTROPY": True, "SAME_PHASE": False})


def _variant(kernel: Any, dtype: torch.dtype, option: dict[str, bool]) -> Variant:
    flags = {"ENTROPY": False, "SOFTCAP": False, "SAME_PHASE": True} | option
    tile = RowTile.choose(1 << 17, dtype.itemsize, flags["SOFTCAP"])
    logits = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(UNSPECIALIZED, "i32")
    types |= {"p_logits": logits, "p_out": logits, "p_targets": "*i64", "p_mask": "*i1"}
    types |= dict.fromkeys(("pre", "cap", "k", "factor"), "fp32")
    name = " ".join([logits[1:], *(f"{flag}={value:d}".lower() for flag, value in option.items())])
    aligned, reads = ("p_logits", "p_out"), (dtype.itemsize,)
    return Variant(kernel, name, types, flags | tile.constants(), tile.threads, aligned, reads=reads)

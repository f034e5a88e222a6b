"""Log-probs of targets and entropy from logits: one program per row, one read forward, one read and write backward.

With scores y_j = softcap(scale·x_j), maximum M = max_j y_j and the probability p_j of column j:

    log_sum = log Σ_j exp((y_j - M)/T)                 logp = (y_t - M)/T - log_sum
    entropy = log_sum - Σ_j p_j·(y_j - M)/T
    d/dx_j  = slope_j/T·(g·(1[j = t] - p_j) - h·p_j·(log p_j + entropy)),    slope_j = dy_j/dx_j

for upstream gradients g of logp and h of entropy.

Memory: forward reads each valid logit once (and less than one part in a thousand of them twice) and writes 16 bytes
a row. Backward reads and writes each logit once; it may write over the logits, since an element is written by the
thread that read it. Rows that are masked, or whose upstream gradients are 0, read no logits; backward writes zeros.

Maximum and sums are kept per lane (column of the tile, rows.py), thus in the registers of one thread, and are
combined once at the end: no reduction and no barrier inside the loop.

Numerics: float32. The maximum is subtracted before temperature is applied, so that finite logits up to 3e38 are
safe; it starts at the lowest finite number, so that a block of -inf is too. log_sum is log1p of the sum without its
top element: of a peaked row's 1 + 1e-9 float32 keeps only the 1, and 1 - p of its target would be rounding error.
That sum needs the top element's lane once more, term by term. In backward the target gets -expm1(logp), not 1 - p.

Compiled by Triton 3.7.1 for sm_90, bf16 (not yet timed on a GPU): forward 59 registers and 8.0 instructions an
element (78 and 10.8 with entropy), backward 44 and 7.0 (64 and 9.9), all wide accesses 128 bits, no spills.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LogitsTransform
from .common import LN2, LOG2E, LOWEST, Variant, exp, expm1, f32, launch_options, log1p, on_device, tanh, tanh_slope
from .rows import RowTile, edge_columns, fill_zeros, load_scores, scalars, unit_stride

MIN_EXPONENT = tl.constexpr(-200.0)
"""exp2 of it is 0 in float32; stands for -inf in w·log w, which must be 0 where w is 0."""

CHUNK = tl.constexpr(128)
"""Elements of the top lane that are read at once."""

UNSPECIALIZED = (
    "n_tokens", "n_valid", "n_cols", "ignore_index", "stride_xb", "stride_xl", "stride_ob", "stride_ol",
    "stride_tb", "stride_tl", "stride_mb", "stride_ml", "stride_gb", "stride_gl", "stride_hb", "stride_hl",
)  # fmt: skip
"""Sizes and strides change from batch to batch: no recompilation when one happens to be 1 or divisible by 16."""

UNALIGNED = ("p_targets", "p_mask", "p_grad_logp", "p_grad_entropy")
"""Read one element a row: their alignment is worth nothing."""


@triton.jit
def accumulate(b_y, b_max, b_sum, b_ent, k, ENTROPY: tl.constexpr):
    """Take a tile [ROWS, LANES] of scores into the lanes' max, Σ w and Σ w·log2 w, w = exp2((y - max)·k)."""
    b_new = tl.maximum(b_max, tl.max(b_y, 0))
    b_shift = (b_max - b_new) * k
    b_scale = tl.exp2(b_shift)
    b_log2w = (b_y - b_new[None, :]) * k
    b_w = tl.exp2(b_log2w)
    if ENTROPY:
        b_ent = b_scale * (b_ent + tl.maximum(b_shift, MIN_EXPONENT) * b_sum)
        b_ent += tl.sum(b_w * tl.maximum(b_log2w, MIN_EXPONENT), 0)
    b_sum = b_sum * b_scale + tl.sum(b_w, 0)
    return b_new, b_sum, b_ent


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
    p_row = p_logits + o_row
    head, n_body, o_edge, is_edge = edge_columns(tl.arange(0, 2 * VEC), o_row, n_valid, VEC)
    edge_max = tl.max(load_scores(p_row + o_edge, is_edge, pre, cap, SOFTCAP), 0)
    # A hint on the offset reaches the loads; one on the pointer does not.
    p_body = p_logits + tl.multiple_of(o_row + head, VEC)
    o_lane = tl.arange(0, LANES)
    o_tile = tl.arange(0, ROWS)[:, None] * LANES + o_lane[None, :]
    n_main = n_body // (ROWS * LANES) * (ROWS * LANES)

    b_max = tl.full([LANES], LOWEST, tl.float32)
    b_sum = tl.zeros([LANES], tl.float32)
    b_ent = tl.zeros([LANES], tl.float32)
    for start in range(0, n_main, ROWS * LANES):
        b_y = tl.load(p_body + start + o_tile).to(tl.float32)
        if SOFTCAP:
            b_y = cap * tanh(b_y * pre)
        b_max, b_sum, b_ent = accumulate(b_y, b_max, b_sum, b_ent, k, ENTROPY)
    b_last = load_scores(p_body + n_main + o_tile, n_main + o_tile < n_body, pre, cap, SOFTCAP)
    b_max, b_sum, b_ent = accumulate(b_last, b_max, b_sum, b_ent, k, ENTROPY)

    row_max = tl.maximum(tl.max(b_max, 0), edge_max)
    b_shift = (b_max - row_max) * k
    b_scale = tl.exp2(b_shift)
    i_top = tl.max(tl.where(b_max == row_max, o_lane, 0), 0)
    rest = tl.sum(tl.where(o_lane == i_top, 0.0, b_sum * b_scale), 0)

    # The edges, and the top element's lane once more: elements at the maximum are counted, the others summed.
    b_rest = tl.zeros([CHUNK], tl.float32)
    b_tops = tl.zeros([CHUNK], tl.float32)
    b_spread = tl.zeros([CHUNK], tl.float32)
    for start in range(0, 2 * VEC + tl.cdiv(n_body, LANES), CHUNK):
        o_z = start + tl.arange(0, CHUNK)
        _, _, o_first, is_first = edge_columns(o_z, o_row, n_valid, VEC)
        o_again = (o_z - 2 * VEC) * LANES + i_top
        b_edge = o_z < 2 * VEC
        o_col = tl.where(b_edge, o_first, head + o_again)
        b_in = tl.where(b_edge, is_first, o_again < n_body)
        b_log2w = (load_scores(p_row + o_col, b_in, pre, cap, SOFTCAP) - row_max) * k
        b_w = tl.exp2(b_log2w)
        b_rest += tl.where(b_w >= 1.0, 0.0, b_w)
        b_tops += tl.where(b_w >= 1.0, 1.0, 0.0)
        if ENTROPY:
            b_spread += tl.where(b_edge, b_w * tl.maximum(b_log2w, MIN_EXPONENT), 0.0)
    tops = tl.sum(b_tops, 0)
    rest += tl.sum(b_rest, 0)

    # A NaN is no empty row: it is in `rest`, and goes on from there.
    empty = (tops == 0.0) & (rest == 0.0)
    rest = tl.where(empty, 0.0, rest + (tops - 1.0))
    log_sum = log1p(rest)
    in_range = (target >= 0) & (target < n_valid)
    score = load_scores(p_row + target, in_range, pre, cap, SOFTCAP)
    logp = (score - row_max) * (k * LN2) - log_sum
    logp = tl.where(logp < LOWEST, LOWEST, logp)
    logp = tl.where(score == float("-inf"), float("-inf"), logp)
    tl.store(p_logp + i_row, tl.where(in_range, logp, float("nan")))
    tl.store(p_row_max + i_row, tl.where(empty, 0.0, row_max))
    tl.store(p_log_sum + i_row, tl.where(empty, float("-inf"), log_sum))
    if ENTROPY:
        spread = tl.sum(b_scale * (b_ent + tl.maximum(b_shift, MIN_EXPONENT) * b_sum), 0) + tl.sum(b_spread, 0)
        tl.store(p_entropy + i_row, log_sum - spread * LN2 / (1.0 + rest))


@triton.jit
def gradient(b_x, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr):
    """-p·(g + h·(log p + entropy))·slope: the gradient by the raw logits b_x, as far as they are not the target."""
    b_y = b_x
    if SOFTCAP:
        b_y = cap * tanh(b_x * pre)
    b_log2p = (b_y - row_max) * k - log2_sum
    b_factor = -g
    if ENTROPY:
        b_factor = -g - h * (tl.maximum(b_log2p, MIN_EXPONENT) * LN2 + entropy)
    if SOFTCAP:
        b_factor *= tanh_slope(b_x * pre)
    return tl.exp2(b_log2p) * b_factor


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
    target = tl.full([], 0, tl.int64)
    keep = target == 0
    if p_targets is not None:
        target = tl.load(p_targets + i_b * stride_tb + i_l * stride_tl).to(tl.int64)
        # An out-of-range target has no gradient (its log-prob is NaN: that is where it shows).
        keep = (target != ignore_index) & (target >= 0) & (target < n_valid)
    if p_mask is not None:
        keep = keep & (tl.load(p_mask + i_b * stride_mb + i_l * stride_ml) != 0)
    logp = tl.load(p_logp + i_row)
    log_sum = tl.load(p_log_sum + i_row)
    g = tl.load(p_grad_logp + i_b * stride_gb + i_l * stride_gl).to(tl.float32)
    # No direction for a target of probability 0, no distribution in a row without a finite score.
    g = tl.where(logp == float("-inf"), 0.0, g)
    h = 0.0
    entropy = 0.0
    active = keep & (g != 0.0)
    if ENTROPY:
        h = tl.load(p_grad_entropy + i_b * stride_hb + i_l * stride_hl).to(tl.float32)
        h = tl.where(log_sum == float("-inf"), 0.0, h)
        entropy = tl.load(p_entropy + i_row)
        active = keep & ((g != 0.0) | (h != 0.0))
    o_row = i_b * stride_xb + i_l * stride_xl
    if not active:
        fill_zeros(p_out, o_out, 0, n_cols, VEC, ROWS * LANES)
        return

    # The target's gradient: 1 - p by expm1. Written last, over the tiles' idea of it; its logit is read first.
    d_target = -expm1(logp) * g
    if ENTROPY:
        d_target -= exp(logp) * h * (tl.maximum(logp, MIN_EXPONENT) + entropy)
    d_target *= factor
    if SOFTCAP and p_targets is not None:
        d_target *= tanh_slope(tl.load(p_logits + o_row + target).to(tl.float32) * pre)
        tl.debug_barrier()
    g *= factor
    h *= factor
    row_max = tl.load(p_row_max + i_row)
    log2_sum = log_sum * LOG2E
    head, n_body, o_col, is_edge = edge_columns(tl.arange(0, 2 * VEC), o_row, n_valid, VEC)
    p_edge = p_out + o_out + o_col
    p_body = p_logits + tl.multiple_of(o_row + head, VEC)
    o_grad = o_out + head
    p_grad = p_out + (tl.multiple_of(o_grad, VEC) if SAME_PHASE else o_grad)
    o_tile = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    n_main = n_body // (ROWS * LANES) * (ROWS * LANES)

    b_edge = tl.load(p_logits + o_row + o_col, mask=is_edge, other=0.0).to(tl.float32)
    b_dedge = gradient(b_edge, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
    tl.store(p_edge, b_dedge.to(p_out.dtype.element_ty), mask=is_edge)
    for start in range(0, n_main, ROWS * LANES):
        b_x = tl.load(p_body + start + o_tile).to(tl.float32)
        b_dx = gradient(b_x, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
        tl.store(p_grad + start + o_tile, b_dx.to(p_out.dtype.element_ty))
    b_in = n_main + o_tile < n_body
    b_last = tl.load(p_body + n_main + o_tile, mask=b_in, other=0.0).to(tl.float32)
    b_dlast = gradient(b_last, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
    tl.store(p_grad + n_main + o_tile, b_dlast.to(p_out.dtype.element_ty), mask=b_in)
    fill_zeros(p_out, o_out, n_valid, n_cols, VEC, ROWS * LANES)
    if p_targets is not None:
        tl.debug_barrier()
        tl.store(p_out + o_out + target, d_target.to(p_out.dtype.element_ty))


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
    same_phase = all((x - o) % tile.vector == 0 for x, o in zip(logits.stride()[:2], out.stride()[:2], strict=True))
    if not same_phase:
        # The stores are narrow then, with an address each: a smaller tile keeps them out of the registers' way.
        tile = tile._replace(rows=1)
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
            SAME_PHASE=same_phase, **tile.constants(), **launch_options(tile.threads),
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
    if not flags["SAME_PHASE"]:
        tile = tile._replace(rows=1)
    logits = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(UNSPECIALIZED, "i32")
    types |= {"p_logits": logits, "p_out": logits, "p_targets": "*i64", "p_mask": "*i1"}
    types |= dict.fromkeys(("pre", "cap", "k", "factor"), "fp32")
    name = " ".join([logits[1:], *(f"{flag}={value:d}".lower() for flag, value in option.items())])
    return Variant(kernel, name, types, flags | tile.constants(), tile.threads, ("p_logits", "p_out"))

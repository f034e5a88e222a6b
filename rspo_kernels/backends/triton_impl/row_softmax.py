"""The softmax of one row of logits, as the row kernels make it: its statistics in one pass, its gradient in another.

Formulas in logprobs.py. Maximum and sums are kept per lane (column of the tile, rows.py), thus in the registers of one
thread, and are combined once at the end: no reduction and no barrier inside the loop.

Numerics: float32. The maximum is subtracted before temperature is applied, so that finite logits up to 3e38 are
safe; it starts at the lowest finite number, so that a block of -inf is too. log_sum is log1p of the sum without its
top element: of a peaked row's 1 + 1e-9 float32 keeps only the 1, and 1 - p of its target would be rounding error.
That sum needs the top element's lane once more, term by term. In the gradient the target gets -expm1(logp), not 1 - p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LN2, LOG2E, LOWEST, exp, expm1, log1p, tanh, tanh_slope
from .rows import edge_columns, fill_zeros, load_scores

MIN_EXPONENT = tl.constexpr(-200.0)
"""exp2 of it is 0 in float32; stands for -inf in w·log w, which must be 0 where w is 0."""

CHUNK = tl.constexpr(128)
"""Elements of the top lane that are read at once."""


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


@triton.jit
def finish(b_tops, b_rest, b_spread, b_max, b_score, b_in_range, k):
    """logp of a score, entropy, row_max and log_sum from a row's sums, all relative to its maximum.

    b_tops: elements at the maximum. b_rest: Σ w of the others. b_spread: Σ w·log2 w.
    """
    # A NaN is no empty row: it is in `rest`, and goes on from there.
    b_empty = (b_tops == 0.0) & (b_rest == 0.0)
    b_rest = tl.where(b_empty, 0.0, b_rest + (b_tops - 1.0))
    b_log_sum = log1p(b_rest)
    b_entropy = b_log_sum - b_spread * LN2 / (1.0 + b_rest)
    b_logp = (b_score - b_max) * (k * LN2) - b_log_sum
    b_logp = tl.where(b_logp < LOWEST, LOWEST, b_logp)
    b_logp = tl.where((b_score == float("-inf")) & (b_rest == b_rest), float("-inf"), b_logp)
    b_logp = tl.where(b_in_range, b_logp, float("nan"))
    return b_logp, b_entropy, tl.where(b_empty, 0.0, b_max), tl.where(b_empty, float("-inf"), b_log_sum)


@triton.jit
def row_statistics(
    p_logits, o_row, target, n_valid,
    pre, cap, k,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """logp of the target, entropy (means nothing unless ENTROPY), row_max and log_sum of the row at offset o_row."""
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

    in_range = (target >= 0) & (target < n_valid)
    score = load_scores(p_row + target, in_range, pre, cap, SOFTCAP)
    spread = 0.0
    if ENTROPY:
        spread = tl.sum(b_scale * (b_ent + tl.maximum(b_shift, MIN_EXPONENT) * b_sum), 0) + tl.sum(b_spread, 0)
    return finish(tops, rest, spread, row_max, score, in_range, k)


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


@triton.jit
def row_gradient(
    p_logits, o_row, p_out, o_out, keep, target, n_valid, n_cols,
    g, h, logp, entropy, row_max, log_sum,
    pre, cap, k, factor,
    TARGET: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, SAME_PHASE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the row at offset o_row to offset o_out, zeros where it is 0; returns whether it is not.

    target: -1 where TARGET is not set. h and entropy count where ENTROPY is set.
    """
    # An out-of-range target has no gradient (its log-prob is NaN: that is where it shows).
    if TARGET:
        keep = keep & (target >= 0) & (target < n_valid)
    # No direction for a target of probability 0, no distribution in a row without a finite score.
    g = tl.where((logp == float("-inf")) & (g == g), 0.0, g)
    active = keep & (g != 0.0)
    if ENTROPY:
        h = tl.where(log_sum == float("-inf"), 0.0, h)
        active = keep & ((g != 0.0) | (h != 0.0))
    if active:
        write_row(
            p_logits, o_row, p_out, o_out, target, n_valid, g, h, logp, entropy, row_max, log_sum,
            pre, cap, k, factor, TARGET, ENTROPY, SOFTCAP, SAME_PHASE, VEC, ROWS, LANES,
        )  # fmt: skip
        fill_zeros(p_out, o_out, n_valid, n_cols, VEC, ROWS * LANES)
    else:
        fill_zeros(p_out, o_out, 0, n_cols, VEC, ROWS * LANES)
    return active


@triton.jit
def write_row(
    p_logits, o_row, p_out, o_out, target, n_valid,
    g, h, logp, entropy, row_max, log_sum,
    pre, cap, k, factor,
    TARGET: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, SAME_PHASE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradient of the n_valid logits of a row that has one."""
    # The target's gradient: 1 - p by expm1. Written last, over the tiles' idea of it; its logit is read first.
    d_target = -expm1(logp) * g
    if ENTROPY:
        d_target -= exp(logp) * h * (tl.maximum(logp, MIN_EXPONENT) + entropy)
    d_target *= factor
    if SOFTCAP and TARGET:
        d_target *= tanh_slope(tl.load(p_logits + o_row + target).to(tl.float32) * pre)
        tl.debug_barrier()
    g *= factor
    h *= factor
    log2_sum = log_sum * LOG2E
    head, n_body, o_col, is_edge = edge_columns(tl.arange(0, 2 * VEC), o_row, n_valid, VEC)
    p_edge = p_out + o_out + o_col
    p_body = p_logits + tl.multiple_of(o_row + head, VEC)
    o_grad = o_out + head
    p_grad = p_out + (tl.multiple_of(o_grad, VEC) if SAME_PHASE else o_grad)
    # Stores out of phase are narrow, with an address each: a smaller tile keeps them out of the registers' way.
    TILE_ROWS: tl.constexpr = ROWS if SAME_PHASE else 1
    TILE: tl.constexpr = TILE_ROWS * LANES
    o_tile = tl.arange(0, TILE_ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    n_main = n_body // TILE * TILE

    b_edge = tl.load(p_logits + o_row + o_col, mask=is_edge, other=0.0).to(tl.float32)
    b_dedge = gradient(b_edge, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
    tl.store(p_edge, b_dedge.to(p_out.dtype.element_ty), mask=is_edge)
    for start in range(0, n_main, TILE):
        b_x = tl.load(p_body + start + o_tile).to(tl.float32)
        b_dx = gradient(b_x, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
        tl.store(p_grad + start + o_tile, b_dx.to(p_out.dtype.element_ty))
    b_in = n_main + o_tile < n_body
    b_last = tl.load(p_body + n_main + o_tile, mask=b_in, other=0.0).to(tl.float32)
    b_dlast = gradient(b_last, g, h, entropy, row_max, log2_sum, pre, cap, k, ENTROPY, SOFTCAP)
    tl.store(p_grad + n_main + o_tile, b_dlast.to(p_out.dtype.element_ty), mask=b_in)
    if TARGET:
        tl.debug_barrier()
        tl.store(p_out + o_out + target, d_target.to(p_out.dtype.element_ty))

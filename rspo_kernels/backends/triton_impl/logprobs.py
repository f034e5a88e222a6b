"""draft"""
from __future__ import annotations
import torch
import triton
import triton.language as tl
from .common import LN2, LOG2E, LOWEST, expm1, log1p, tanh, tanh_slope

MIN_EXPONENT = tl.constexpr(-200.0)


@triton.jit
def load_scores(p_x, b_mask, pre, cap, SOFTCAP: tl.constexpr):
    b_x = tl.load(p_x, mask=b_mask, other=float("-inf")).to(tl.float32)
    if SOFTCAP:
        b_x = tl.where(b_mask, cap * tanh(b_x * pre), float("-inf"))
    return b_x


@triton.jit
def accumulate(b_x, b_max, b_sum, b_ent, k, ENTROPY: tl.constexpr):
    b_new = tl.maximum(b_max, tl.max(b_x, 0))
    b_shift = (b_max - b_new) * k
    b_scale = tl.exp2(b_shift)
    b_t = (b_x - b_new[None, :]) * k
    b_w = tl.exp2(b_t)
    if ENTROPY:
        b_ent = b_scale * (b_ent + tl.maximum(b_shift, MIN_EXPONENT) * b_sum)
        b_ent += tl.sum(b_w * tl.maximum(b_t, MIN_EXPONENT), 0)
    b_sum = b_sum * b_scale + tl.sum(b_w, 0)
    return b_new, b_sum, b_ent


@triton.jit
def forward_kernel(
    p_logits, stride_b, stride_l,
    p_targets, stride_tb, stride_tl,
    p_mask, stride_mb, stride_ml,
    p_logp, p_entropy, p_row_max, p_log_sum,
    L, n_cols, ignore_index, pre, cap, k,
    HAS_MASK: tl.constexpr, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):
    pre = pre.to(tl.float32)
    cap = cap.to(tl.float32)
    k = k.to(tl.float32)
    i_row = tl.program_id(0)
    i_b = (i_row // L).to(tl.int64)
    i_l = (i_row % L).to(tl.int64)
    target = tl.load(p_targets + i_b * stride_tb + i_l * stride_tl).to(tl.int64)
    keep = target != ignore_index
    if HAS_MASK:
        keep = keep & (tl.load(p_mask + i_b * stride_mb + i_l * stride_ml) != 0)
    if not keep:
        tl.store(p_logp + i_row, 0.0)
        tl.store(p_row_max + i_row, 0.0)
        tl.store(p_log_sum + i_row, 0.0)
        if ENTROPY:
            tl.store(p_entropy + i_row, 0.0)
        return

    o_row = i_b * stride_b + i_l * stride_l
    p_row = p_logits + o_row
    if ALIGNED:
        head = 0
        n_body = tl.multiple_of(n_cols, VEC)
    else:
        head = tl.minimum((VEC - (o_row % VEC).to(tl.int32)) % VEC, n_cols)
        n_body = (n_cols - head) // VEC * VEC
    p_body = p_logits + tl.multiple_of(o_row + head, VEC)
    BLOCK: tl.constexpr = ROWS * LANES
    o_lane = tl.arange(0, LANES)
    o_tile = tl.arange(0, ROWS)[:, None] * LANES + o_lane[None, :]
    n_main = n_body // BLOCK * BLOCK

    b_max = tl.full([LANES], LOWEST, tl.float32)
    b_sum = tl.zeros([LANES], tl.float32)
    b_ent = tl.zeros([LANES], tl.float32)
    for start in range(0, n_main, BLOCK):
        b_x = tl.load(p_body + start + o_tile).to(tl.float32)
        if SOFTCAP:
            b_x = cap * tanh(b_x * pre)
        b_max, b_sum, b_ent = accumulate(b_x, b_max, b_sum, b_ent, k, ENTROPY)
    b_x = load_scores(p_body + n_main + o_tile, n_main + o_tile < n_body, pre, cap, SOFTCAP)
    b_max, b_sum, b_ent = accumulate(b_x, b_max, b_sum, b_ent, k, ENTROPY)

    row_max = tl.max(b_max, 0)
    if not ALIGNED:
        o_edge = tl.arange(0, 2 * VEC)
        o_col = tl.where(o_edge < VEC, o_edge, head + n_body + o_edge - VEC)
        b_in = tl.where(o_edge < VEC, o_edge < head, o_col < n_cols)
        b_edge = load_scores(p_row + o_col, b_in, pre, cap, SOFTCAP)
        row_max = tl.maximum(row_max, tl.max(b_edge, 0))

    b_shift = (b_max - row_max) * k
    b_scale = tl.exp2(b_shift)
    i_top = tl.max(tl.where(b_max == row_max, o_lane, -1), 0)
    rest = tl.sum(tl.where(o_lane == i_top, 0.0, b_sum * b_scale), 0)
    tops = 0.0
    if ENTROPY:
        ent = tl.sum(b_scale * (b_ent + tl.maximum(b_shift, MIN_EXPONENT) * b_sum), 0)
    n_lane = tl.where(i_top < 0, 0, n_body)
    for start in range(0, n_lane, CHUNK * LANES):
        o_x = start + tl.arange(0, CHUNK) * LANES + i_top
        b_y = load_scores(p_body + o_x, o_x < n_body, pre, cap, SOFTCAP)
        b_v = tl.exp2((b_y - row_max) * k)
        rest += tl.sum(tl.where(b_v >= 1.0, 0.0, b_v), 0)
        tops += tl.sum(tl.where(b_v >= 1.0, 1.0, 0.0), 0)
    if not ALIGNED:
        b_t = (b_edge - row_max) * k
        b_v = tl.exp2(b_t)
        rest += tl.sum(tl.where(b_v >= 1.0, 0.0, b_v), 0)
        tops += tl.sum(tl.where(b_v >= 1.0, 1.0, 0.0), 0)
        if ENTROPY:
            ent += tl.sum(b_v * tl.maximum(b_t, MIN_EXPONENT), 0)

    empty = tops == 0.0
    rest = rest + (tops - 1.0)
    log_sum = log1p(tl.where(empty, 0.0, rest))
    in_range = (target >= 0) & (target < n_cols)
    x = load_scores(p_row + target, in_range, pre, cap, SOFTCAP)
    logp = (x - row_max) * k * LN2 - log_sum
    logp = tl.where(logp < LOWEST, LOWEST, logp)
    logp = tl.where(x == float("-inf"), float("-inf"), logp)
    logp = tl.where(in_range, logp, float("nan"))
    tl.store(p_logp + i_row, logp)
    tl.store(p_row_max + i_row, tl.where(empty, 0.0, row_max))
    tl.store(p_log_sum + i_row, tl.where(empty, float("-inf"), log_sum))
    if ENTROPY:
        entropy = tl.maximum(log_sum - ent * LN2 / (1.0 + rest), 0.0)
        tl.store(p_entropy + i_row, tl.where(empty, 0.0, entropy))

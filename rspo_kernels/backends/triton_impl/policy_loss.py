"""The policy loss with its gradients and statistics: one launch (and the clearing of one counter).

For each token, with r = exp(logp - behavior), c = exp(old - behavior) and the interval lower .. upper around c:

    J = A·clip(r)·min(1, cap/c)      loss_t = -J + kl_coef·KL(logp, ref) - entropy_coef·entropy
    d loss_t/d logp = -J where r is not clipped, else 0; plus kl_coef·dKL/d logp

(or the J of "cispo" and "sapo"), and then loss_sum = Σ w·loss_t and the statistics of config.STATS. PolicyLossConfig
has all of it in words, reference.policy_loss_terms in PyTorch.

Memory: every input is read once, the gradients are written once; partners of masked tokens are not read. A program
takes BLOCK tokens and leaves one row of partial sums. The last program to finish, known by a ticket, adds the rows up
in a fixed order: no float atomics, so two runs give the same bits. Where tokens share the ratio of a segment, a
launch before makes the ratios and one after spreads their gradient (segment_ratios.py).

Numerics: float32. Log-ratios are clamped before exp and gradients chosen by `where`, never multiplied by 0: a masked
token, or one of weight 0, has a gradient of exactly 0 whatever it holds, a clipped or clamped one whatever else but NaN
it holds. Log-probs of -inf count as -1e30. k3 = exp(d) - 1 - d is a series near 0, where the difference would have no
digits left. NaN makes the loss and the token's gradient NaN: the clamps let it through, which the hardware's would
not by themselves, and what comparisons would choose away is added at the end.

Compiled by Triton 3.7.1 for sm_90 (not yet timed on a GPU): 56 registers with the fewest options, 72 with RSPO's, 106
with all; 32-bit loads side by side, since N may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import CLIPPED_LOSSES, KL_CLAMP, STATS, PolicyLossConfig
from ..common import RatioSegments
from .common import Variant, exp, expm1, launch_options, on_device
from .segment_ratios import LOWEST_LOGP, Members, at_least_lowest, load_logp

BLOCK = 512
THREADS = 128
PARTIALS = 64
"""Rows of partial sums that the last program reads at once."""

KL_LIMIT = tl.constexpr(KL_CLAMP)

# A row of partial sums: the statistics in their order, in the place of ess the sum of r², then the loss; a power of 2.
SLOTS = tl.constexpr(16)
NUM_TOKENS = tl.constexpr(STATS.index("num_tokens"))
CLIP_LOW = tl.constexpr(STATS.index("clip_frac_low"))
CLIP_HIGH = tl.constexpr(STATS.index("clip_frac_high"))
CLIP_DUAL = tl.constexpr(STATS.index("clip_frac_dual"))
KL_K1 = tl.constexpr(STATS.index("approx_kl_k1"))
KL_K3 = tl.constexpr(STATS.index("approx_kl_k3"))
KL_REF = tl.constexpr(STATS.index("kl_ref"))
ENTROPY = tl.constexpr(STATS.index("entropy"))
RATIO_MEAN = tl.constexpr(STATS.index("ratio_mean"))
RATIO_MAX = tl.constexpr(STATS.index("ratio_max"))
CENTER_MEAN = tl.constexpr(STATS.index("center_mean"))
CENTER_MAX = tl.constexpr(STATS.index("center_max"))
ESS = tl.constexpr(STATS.index("ess"))
LOSS = tl.constexpr(len(STATS))

INPUTS = (
    "p_logp", "p_advantages", "p_index", "p_mask", "p_weights", "p_old", "p_behavior", "p_ref", "p_entropy",
    "p_segment", "p_log_r", "p_log_c",
)  # fmt: skip


@triton.jit
def bounded(x, limit):
    """x within ±limit; NaN stays NaN."""
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def k3_minus(b_d):
    """exp(d) - 1 - d."""
    series = b_d * b_d * (0.5 + b_d * (1 / 6 + b_d * (1 / 24 + b_d * (1 / 120))))
    return tl.where(tl.abs(b_d) < 0.05, series, expm1(b_d) - b_d)


@triton.jit
def kl_estimate(b_gap, ESTIMATOR: tl.constexpr):
    """KL estimate of gap = ref - logp and its derivative by logp."""
    b_d = bounded(b_gap, KL_LIMIT)
    if ESTIMATOR == "k1":
        b_kl, b_slope = -b_d, tl.full(b_d.shape, 1.0, tl.float32)
    elif ESTIMATOR == "k2":
        b_kl, b_slope = 0.5 * b_d * b_d, -b_d
    else:
        b_kl, b_slope = k3_minus(b_d), -expm1(b_d)
    return b_kl, tl.where(tl.abs(b_gap) > KL_LIMIT, 0.0, b_slope)


@triton.jit
def add_up(p_partials, n_rows, p_loss, p_stats, PARTIALS: tl.constexpr):
    """Partial sums [n_rows, SLOTS] -> the loss and the statistics as means over tokens."""
    o_slot = tl.arange(0, SLOTS)
    is_max = (o_slot == RATIO_MAX) | (o_slot == CENTER_MAX)
    b_sum = tl.zeros([PARTIALS, SLOTS], tl.float32)
    for start in range(0, n_rows, PARTIALS):
        o_row = start + tl.arange(0, PARTIALS)
        b_in = (o_row < n_rows)[:, None] & (o_slot <= LOSS)[None, :]
        b_part = tl.load(p_partials + o_row[:, None] * SLOTS + o_slot[None, :], mask=b_in, other=0.0)
        b_sum = tl.where(is_max[None, :], tl.maximum(b_sum, b_part), b_sum + b_part)
    b_total = tl.where(is_max, tl.max(b_sum, 0), tl.sum(b_sum, 0))

    count = tl.sum(tl.where(o_slot == NUM_TOKENS, b_total, 0.0), 0)
    ratio = tl.sum(tl.where(o_slot == RATIO_MEAN, b_total, 0.0), 0)
    square = tl.sum(tl.where(o_slot == ESS, b_total, 0.0), 0)
    n = tl.maximum(count, 1.0)
    # (Σr)²/(n·Σr²) without squaring the sum, which may not fit.
    ess = (ratio / n) * (ratio / tl.where(square == 0.0, 1.0, square))
    b_stats = tl.where(is_max | (o_slot == NUM_TOKENS), b_total, b_total / n)
    b_stats = tl.where(o_slot == ESS, ess, b_stats)
    tl.store(p_stats + o_slot, b_stats, mask=o_slot < LOSS)
    tl.store(p_loss, tl.sum(tl.where(o_slot == LOSS, b_total, 0.0), 0))


@triton.jit
def surrogate(
    b_ratio, b_center, b_log_c, b_new, b_adv, b_on_policy, b_possible,
    clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative,
    LOSS_FORM: tl.constexpr, CLIP_CENTER: tl.constexpr, CENTER_CAP: tl.constexpr, WEIGHT_CAP: tl.constexpr,
    DUAL_CLIP: tl.constexpr, DUAL_CLIP_REPLAY: tl.constexpr,
):  # fmt: skip
    """J, its derivative by log r (by logp for "cispo"), and where the lower, upper and dual bound acted."""
    b_pivot = b_center
    if CENTER_CAP:
        b_pivot = tl.minimum(b_pivot, center_cap, propagate_nan=tl.PropagateNan.ALL)
    if CLIP_CENTER == "none":
        b_pivot = tl.full(b_center.shape, 1.0, tl.float32)
    if CLIP_CENTER == "relative":
        b_lower, b_upper = b_pivot * (1.0 - clip_low), b_pivot * (1.0 + clip_high)
    else:
        b_lower, b_upper = b_pivot - clip_low, b_pivot + clip_high

    b_low, b_high, b_dual = b_ratio < b_lower, b_ratio > b_upper, b_possible & False
    if LOSS_FORM == "sapo":
        b_tau = tl.where(b_adv > 0.0, tau_positive, tau_negative)
        b_up = 1.0 / (1.0 + exp(-b_tau * (b_ratio - b_pivot)))
        b_down = 1.0 / (1.0 + exp(b_tau * (b_ratio - b_pivot)))
        b_objective = 4.0 / b_tau * b_up * b_adv
        b_slope = 4.0 * b_up * b_down * b_ratio * b_adv
        b_low, b_high = b_dual, b_dual
    elif LOSS_FORM == "cispo":
        b_slope = tl.where(b_low, b_lower, tl.where(b_high, b_upper, b_ratio)) * b_adv
        b_objective = tl.where(b_possible, b_slope * b_new, 0.0)
    else:
        b_low, b_high = b_low & (b_adv < 0.0), b_high & (b_adv > 0.0)
        b_bound = tl.where(b_low, b_lower, tl.where(b_high, b_upper, b_ratio))
        if DUAL_CLIP:
            b_dual = (b_adv < 0.0) & (b_ratio > dual_clip * b_pivot)
            if not DUAL_CLIP_REPLAY:
                b_dual = b_dual & b_on_policy
            b_bound = tl.where(b_dual, dual_clip * b_pivot, b_bound)
        b_objective = b_bound * b_adv
        b_slope = tl.where(b_low | b_high | b_dual, 0.0, b_objective)
    if WEIGHT_CAP:
        # min(c, cap)/c, in log space.
        b_weight = exp(tl.minimum(log_weight_cap - b_log_c, 0.0))
        b_objective, b_slope = b_objective * b_weight, b_slope * b_weight
    return b_objective, b_slope, b_low, b_high, b_dual


@triton.jit
def token_loss(
    b_logp, o_t, b_keep,
    p_advantages, p_index, p_weights, p_old, p_behavior, p_ref, p_segment, p_log_r, p_log_c,
    clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative, kl_coef, clamp,
    LOSS_FORM: tl.constexpr, CLIP_CENTER: tl.constexpr, CENTER_CAP: tl.constexpr, WEIGHT_CAP: tl.constexpr,
    DUAL_CLIP: tl.constexpr, DUAL_CLIP_REPLAY: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The loss of tokens o_t, a block or a single one, from their log-probs (0 where not kept), without entropy.

    Returns weight and loss; the weighted derivatives by the log-ratio that a segment shares (0 without segments) and
    by logp; then what the statistics need: KL, logp - old, ratio, centre, and which bound acted.
    """
    b_possible = (b_logp < LOWEST_LOGP) == 0
    b_new = at_least_lowest(b_logp)
    b_old = b_new
    if p_old is not None:
        b_old = load_logp(p_old, o_t, b_keep)
    b_behavior = b_old
    if p_behavior is not None:
        b_behavior = load_logp(p_behavior, o_t, b_keep)
    o_adv = o_t
    if p_index is not None:
        o_adv = tl.load(p_index + o_t, mask=b_keep, other=0).to(tl.int64)
    b_adv = tl.load(p_advantages + o_adv, mask=b_keep, other=0.0).to(tl.float32)
    b_w = tl.where(b_keep, 1.0, 0.0)
    if p_weights is not None:
        b_w = tl.load(p_weights + o_t, mask=b_keep, other=0.0).to(tl.float32)

    b_raw_r, b_raw_c = b_new - b_behavior, b_old - b_behavior
    if p_segment is not None:
        b_segment = tl.load(p_segment + o_t, mask=b_keep, other=0).to(tl.int64)
        b_raw_r = tl.load(p_log_r + b_segment, mask=b_keep, other=0.0)
        b_raw_c = tl.load(p_log_c + b_segment, mask=b_keep, other=0.0)
    b_movable = (tl.abs(b_raw_r) > clamp) == 0
    b_log_c = bounded(b_raw_c, clamp)
    b_ratio, b_center = exp(bounded(b_raw_r, clamp)), exp(b_log_c)
    b_objective, b_slope, b_low, b_high, b_dual = surrogate(
        b_ratio, b_center, b_log_c, b_new, b_adv, b_raw_c == 0.0, b_possible,
        clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative,
        LOSS_FORM, CLIP_CENTER, CENTER_CAP, WEIGHT_CAP, DUAL_CLIP, DUAL_CLIP_REPLAY,
    )  # fmt: skip
    b_loss = -b_objective
    b_taint = b_raw_r + b_raw_c + b_adv
    # What reaches logp through the ratio, perhaps a segment's, and what reaches it directly.
    b_zero = tl.zeros(b_ratio.shape, tl.float32)
    b_by_ratio = tl.where(b_movable, -b_slope, 0.0)
    b_direct = b_zero
    if LOSS_FORM == "cispo":
        b_by_ratio, b_direct = b_zero, tl.where(b_possible, -b_slope, 0.0)

    b_kl = b_zero
    if p_ref is not None:
        b_gap = load_logp(p_ref, o_t, b_keep) - b_new
        b_taint += b_gap
        b_kl, b_kl_slope = kl_estimate(b_gap, KL_ESTIMATOR)
        if KL_WEIGHTED:
            b_kl_slope, b_kl = b_kl_slope * b_ratio, b_kl * b_ratio
            b_by_ratio += kl_coef * tl.where(b_movable, b_kl, 0.0)
        b_loss += kl_coef * b_kl
        b_direct += kl_coef * tl.where(b_possible, b_kl_slope, 0.0)
    if p_segment is None:
        b_direct += tl.where(b_possible, b_by_ratio, 0.0)
    # Comparisons choose NaN away, and guards on the gradient's norm would let the step through.
    b_poison = tl.where(b_taint != b_taint, float("nan"), 0.0)
    b_loss += b_poison
    b_direct += b_poison
    b_silent = b_w == 0.0
    b_shared = tl.where(b_silent, 0.0, b_w * b_by_ratio)
    b_direct = tl.where(b_silent, 0.0, b_w * b_direct)
    return b_w, b_loss, b_shared, b_direct, b_kl, b_new - b_old, b_ratio, b_center, b_low, b_high, b_dual


@triton.jit(do_not_specialize=["n_tokens"], do_not_specialize_on_alignment=INPUTS)
def policy_loss_kernel(
    p_logp, p_advantages, p_index, p_mask, p_weights, p_old, p_behavior, p_ref, p_entropy,
    p_segment, p_log_r, p_log_c,
    p_grad_logp, p_shared, p_grad_entropy, p_partials, p_ticket, p_loss, p_stats,
    n_tokens,
    clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative,
    kl_coef, entropy_coef, clamp,
    LOSS_FORM: tl.constexpr, CLIP_CENTER: tl.constexpr, CENTER_CAP: tl.constexpr, WEIGHT_CAP: tl.constexpr,
    DUAL_CLIP: tl.constexpr, DUAL_CLIP_REPLAY: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    i_block = tl.program_id(0)
    o_t = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_inside = o_t < n_tokens
    b_keep = b_inside
    if p_mask is not None:
        b_keep = b_keep & (tl.load(p_mask + o_t, mask=b_inside, other=0) != 0)
    b_logp = tl.load(p_logp + o_t, mask=b_keep, other=0.0).to(tl.float32)
    b_w, b_loss, b_shared, b_slope, b_kl, b_change, b_ratio, b_center, b_low, b_high, b_dual = token_loss(
        b_logp, o_t, b_keep,
        p_advantages, p_index, p_weights, p_old, p_behavior, p_ref, p_segment, p_log_r, p_log_c,
        clip_low, clip_high, center_cap, log_weight_cap, dual_clip, tau_positive, tau_negative, kl_coef, clamp,
        LOSS_FORM, CLIP_CENTER, CENTER_CAP, WEIGHT_CAP, DUAL_CLIP, DUAL_CLIP_REPLAY, KL_ESTIMATOR, KL_WEIGHTED,
    )  # fmt: skip
    b_ent = tl.zeros([BLOCK], tl.float32)
    if p_entropy is not None:
        b_ent = tl.load(p_entropy + o_t, mask=b_keep, other=0.0).to(tl.float32)
        b_loss -= entropy_coef * b_ent
        b_taint = tl.where((b_ent != b_ent) & (b_w != 0.0), float("nan"), 0.0)
        b_slope += b_taint
        tl.store(p_grad_entropy + o_t, b_taint - entropy_coef * b_w, mask=b_inside)
    if p_segment is not None:
        tl.store(p_shared + o_t, b_shared, mask=b_inside)
    tl.store(p_grad_logp + o_t, b_slope, mask=b_inside)

    b_change = bounded(b_change, clamp)
    b_ratio = tl.where(b_keep, b_ratio, 0.0)
    b_center = tl.where(b_keep, b_center, 0.0)
    p_row = p_partials + i_block * SLOTS
    tl.store(p_row + NUM_TOKENS, tl.sum(tl.where(b_keep, 1.0, 0.0), 0))
    tl.store(p_row + CLIP_LOW, tl.sum(tl.where(b_keep & b_low, 1.0, 0.0), 0))
    tl.store(p_row + CLIP_HIGH, tl.sum(tl.where(b_keep & b_high, 1.0, 0.0), 0))
    tl.store(p_row + CLIP_DUAL, tl.sum(tl.where(b_keep & b_dual, 1.0, 0.0), 0))
    tl.store(p_row + KL_K1, tl.sum(-b_change, 0))
    tl.store(p_row + KL_K3, tl.sum(k3_minus(b_change), 0))
    tl.store(p_row + KL_REF, tl.sum(b_kl, 0))
    tl.store(p_row + ENTROPY, tl.sum(b_ent, 0))
    tl.store(p_row + RATIO_MEAN, tl.sum(b_ratio, 0))
    tl.store(p_row + RATIO_MAX, tl.max(b_ratio, 0))
    tl.store(p_row + CENTER_MEAN, tl.sum(b_center, 0))
    tl.store(p_row + CENTER_MAX, tl.max(b_center, 0))
    tl.store(p_row + ESS, tl.sum(b_ratio * b_ratio, 0))
    tl.store(p_row + LOSS, tl.sum(tl.where(b_w == 0.0, 0.0, b_w * b_loss), 0))

    # Whoever draws the last ticket sees the rows of all: each released its own with its ticket.
    tl.debug_barrier()
    n_rows = tl.num_programs(0)
    if tl.atomic_add(p_ticket, 1, sem="acq_rel") == n_rows - 1:
        add_up(p_partials, n_rows, p_loss, p_stats, PARTIALS)


def policy_loss_forward(
    logp: Tensor,
    advantages: Tensor,
    advantage_index: Tensor | None,
    mask: Tensor | None,
    weights: Tensor | None,
    old_logp: Tensor | None,
    behavior_logp: Tensor | None,
    ref_logp: Tensor | None,
    entropy: Tensor | None,
    segments: RatioSegments | None,
    config: PolicyLossConfig,
    *,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unnormalised loss (0-d), its gradients for logp and entropy [N], statistics [len(STATS)] for tokens [N]."""
    n_tokens = logp.numel()
    n_blocks = max(1, triton.cdiv(n_tokens, block))
    vectors = (logp, advantages, advantage_index, mask, weights, old_logp, behavior_logp, ref_logp, entropy)
    inputs = [None if x is None else x.contiguous() for x in vectors]
    grad_logp = logp.new_empty(n_tokens, dtype=torch.float32)
    grad_entropy = logp.new_empty(0 if entropy is None else n_tokens, dtype=torch.float32)
    partials = logp.new_empty(n_blocks, SLOTS.value, dtype=torch.float32)
    ticket = logp.new_zeros(1, dtype=torch.int32)
    loss, stats = logp.new_empty((), dtype=torch.float32), logp.new_empty(len(STATS), dtype=torch.float32)
    shared, ratios = None, (None, None, None)
    if segments is not None:
        members = Members.of(segments)
        shared = torch.empty_like(grad_logp)
        ratios = (segments.index.contiguous(), *members.log_ratios(inputs[0], inputs[5], inputs[6]))
    with on_device(logp):
        policy_loss_kernel[(n_blocks,)](
            *inputs, *ratios, grad_logp, shared, grad_entropy, partials, ticket, loss, stats,
            n_tokens, *scalars(config).values(),
            **options(config), BLOCK=block, PARTIALS=PARTIALS, **launch_options(THREADS),
        )  # fmt: skip
    if segments is not None:
        members.add_gradient(inputs[0], shared, grad_logp)
    return loss, grad_logp, grad_entropy, stats


def scalars(config: PolicyLossConfig) -> dict[str, float]:
    """The config's numbers: arguments of the kernel, so that a change compiles nothing."""
    return {
        "clip_low": float(config.clip_low),
        "clip_high": float(config.clip_high),
        "center_cap": float(config.center_cap or 0.0),
        "log_weight_cap": math.log(config.weight_cap or 1.0),
        "dual_clip": float(config.dual_clip or 0.0),
        "tau_positive": float(config.sapo_tau_positive),
        "tau_negative": float(config.sapo_tau_negative),
        "kl_coef": float(config.kl_coef),
        "entropy_coef": float(config.entropy_coef),
        "clamp": float(config.log_ratio_clamp),
    }


def options(config: PolicyLossConfig) -> dict[str, bool | str]:
    """The config's choices: each combination is a kernel of its own."""
    return {
        "LOSS_FORM": "clipped" if config.loss in CLIPPED_LOSSES else config.loss,
        "CLIP_CENTER": config.clip_center,
        "CENTER_CAP": config.center_cap is not None,
        "WEIGHT_CAP": config.weight_cap is not None,
        "DUAL_CLIP": config.dual_clip is not None,
        "DUAL_CLIP_REPLAY": config.dual_clip_replay,
        "KL_ESTIMATOR": config.kl_estimator,
        "KL_WEIGHTED": config.kl_weighted,
    }


def variants() -> Iterator[Variant]:
    """For compile_check: the kernel with the least and the most it can be given, and the forms of the loss."""
    most = {"clip_center": "relative", "center_cap": 1.0, "weight_cap": 2.0, "kl_weighted": True}
    plain = INPUTS[:9]
    for name, config, given in (
        ("minimal", PolicyLossConfig(), ("p_logp", "p_advantages")),
        ("RSPO", PolicyLossConfig(center_cap=1.0, kl_coef=0.01), tuple(n for n in plain if n != "p_entropy")),
        ("full", PolicyLossConfig(**most, dual_clip=3.0), plain),
        ("full, segments", PolicyLossConfig(**most, dual_clip=3.0), INPUTS),
        ("full, cispo", PolicyLossConfig("cispo", **most), plain),
        ("full, sapo", PolicyLossConfig("sapo", **most), plain),
    ):
        types = dict.fromkeys(policy_loss_kernel.arg_names, "*fp32") | dict.fromkeys(scalars(config), "fp32")
        types |= {"p_index": "*i64", "p_mask": "*i1", "p_segment": "*i64", "p_ticket": "*i32", "n_tokens": "i32"}
        absent = dict.fromkeys(n for n in INPUTS if n not in given)
        constants = absent | options(config) | {"BLOCK": BLOCK, "PARTIALS": PARTIALS}
        yield Variant(policy_loss_kernel, name, types, constants, THREADS, elements=BLOCK)

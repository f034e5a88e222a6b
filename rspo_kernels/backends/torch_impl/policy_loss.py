"""The policy loss with its gradients and statistics, as element-wise operations on vectors of tokens.

The formulas are those of config.PolicyLossConfig. Gradients are written out and chosen, never multiplied by 0: a
masked token, or one of weight 0, has a gradient of exactly 0 whatever it holds, a clipped or clamped one whatever else
it holds short of NaN, which makes the loss and the token's gradient NaN. Choices between a number and 0 go by its bits
(`only`): torch.where takes a branch for each element on the CPU, twenty times as long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...config import CLIPPED_LOSSES, KL_CLAMP, PolicyLossConfig
from ..common import RatioSegments, compute_dtype, index_sums

LOWEST = -1e30
"""Stands for -inf in differences of log-probabilities."""


class Surrogate(NamedTuple):
    """J of each token, its derivative by log r, and what the bounds did."""

    objective: Tensor
    slope: Tensor
    clip_low: Tensor
    clip_high: Tensor
    clip_dual: Tensor


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unnormalised loss (0-d), its gradients for logp and entropy [N], statistics [len(STATS)] for tokens [N]."""
    dtype = compute_dtype(logp.dtype)
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    kept_bits = bits(keep, dtype)

    def clean(x: Tensor) -> Tensor:
        return only(x.to(dtype), kept_bits)

    new = clean(logp)
    possible = ~(new < LOWEST)
    new = new.clamp(min=LOWEST)
    old = new if old_logp is None else clean(old_logp).clamp(min=LOWEST)
    behavior = old if behavior_logp is None else clean(behavior_logp).clamp(min=LOWEST)
    adv = clean(advantages if advantage_index is None else advantages[advantage_index])
    w = keep.to(dtype) if weights is None else clean(weights)

    clamp = config.log_ratio_clamp
    raw_r, raw_c = new - behavior, old - behavior
    if segments is not None:
        raw_r, raw_c = segment_sums(torch.stack([raw_r, raw_c]) * segments.share, segments)[:, segments.index]
    movable = ~(raw_r.abs() > clamp)
    ratio, log_c = raw_r.clamp(-clamp, clamp).exp(), raw_c.clamp(-clamp, clamp)
    center = log_c.exp()
    part = surrogate(ratio, center, log_c, new, adv, raw_c == 0, possible, config)
    loss = -part.objective
    taint = raw_r + raw_c + adv
    # What reaches logp through the segment's ratio, and what reaches it directly.
    by_ratio = only(-part.slope, bits(movable, dtype))
    direct = torch.zeros_like(loss)
    if config.loss == "cispo":
        by_ratio, direct = direct, only(-part.slope, bits(possible, dtype))

    kl_ref = torch.zeros_like(loss)
    if ref_logp is not None:
        gap = clean(ref_logp).clamp(min=LOWEST) - new
        kl_ref, kl_slope = kl_estimate(gap, config.kl_estimator)
        taint = taint + gap
        kl_slope = only(kl_slope, bits(possible & ~(gap.abs() > KL_CLAMP), dtype))
        if config.kl_weighted:
            kl_slope, kl_ref = kl_slope * ratio, kl_ref * ratio
            by_ratio = by_ratio + config.kl_coef * only(kl_ref, bits(movable, dtype))
        loss = loss + config.kl_coef * kl_ref
        direct = direct + config.kl_coef * kl_slope
    ent = torch.zeros_like(loss)
    grad_entropy = loss.new_empty(0)
    if entropy is not None:
        ent = clean(entropy)
        loss = loss - config.entropy_coef * ent
        taint = taint + ent
        grad_entropy = -config.entropy_coef * w + only(ent, bits(ent.isnan() & (w != 0), dtype))
    speaks = bits(w != 0, dtype)
    # Comparisons choose NaN away, and guards on the gradient's norm would let the step through.
    poison = only(taint, bits(taint.isnan(), dtype))
    loss, direct = loss + poison, direct + poison
    loss_sum = only(w * loss, speaks).sum()
    shared = only(w * by_ratio, speaks)
    if segments is not None:
        # Masked tokens have no share, also not of NaN.
        shared = only(segment_sums(shared, segments)[segments.index] * segments.share, kept_bits)
    # A target of probability 0 has no direction to move in.
    grad_logp = only(shared, bits(possible, dtype)) + only(w * direct, speaks)

    log_new = (new - old).clamp(-clamp, clamp)
    kl_old = exp_minus_linear(log_new)
    per_token = (part.clip_low, part.clip_high, part.clip_dual, -log_new, kl_old, kl_ref, ent)
    return loss_sum, grad_logp, grad_entropy, statistics(keep, per_token, ratio, center)


def surrogate(
    ratio: Tensor,
    center: Tensor,
    log_c: Tensor,
    logp: Tensor,
    adv: Tensor,
    on_policy: Tensor,
    possible: Tensor,
    config: PolicyLossConfig,
) -> Surrogate:
    """J and its derivative by log r ("cispo": by logp) of each token."""
    lower, upper, pivot = clip_bounds(center, config)
    never = torch.zeros_like(on_policy)
    # min(c, cap)/c, in log space.
    weight = None if config.weight_cap is None else (math.log(config.weight_cap) - log_c).clamp(max=0.0).exp()
    if config.loss == "sapo":
        taus = adv.new_tensor([config.sapo_tau_negative, config.sapo_tau_positive])
        tau = taus[(adv > 0).long()]
        z = tau * (ratio - pivot)
        objective = 4.0 / tau * torch.sigmoid(z) * adv
        slope = 4.0 * torch.sigmoid(z) * torch.sigmoid(-z) * ratio * adv
        clip_low = clip_high = dual = never
    elif config.loss == "cispo":
        clip_low, clip_high, dual = ratio < lower, ratio > upper, never
        slope = torch.maximum(torch.minimum(ratio, upper), lower) * adv
        objective = only(slope * logp, bits(possible, logp.dtype))
    else:
        assert config.loss in CLIPPED_LOSSES
        clip_low, clip_high, dual = (adv < 0) & (ratio < lower), (adv > 0) & (ratio > upper), never
        bounds = [(clip_low, lower), (clip_high, upper)]
        if config.dual_clip is not None:
            # It bounds the ratio from above, clip_low from below: never both.
            dual = (adv < 0) & (ratio > config.dual_clip * pivot)
            if not config.dual_clip_replay:
                dual = dual & on_policy
            bounds.append((dual, config.dual_clip * pivot))
        inside = bits(~(clip_low | clip_high | dual), ratio.dtype)
        slope = only(ratio, inside) * adv
        objective = slope + sum(only(bound, bits(clipped, ratio.dtype)) for clipped, bound in bounds) * adv
    if weight is not None:
        objective, slope = objective * weight, slope * weight
    return Surrogate(objective, slope, clip_low, clip_high, dual)


def clip_bounds(center: Tensor, config: PolicyLossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Lower and upper bound of the ratio, and the point they surround."""
    if config.clip_center == "none":
        pivot = torch.ones_like(center)
    else:
        pivot = center if config.center_cap is None else center.clamp(max=config.center_cap)
    if config.clip_center == "relative":
        return pivot * (1 - config.clip_low), pivot * (1 + config.clip_high), pivot
    return pivot - config.clip_low, pivot + config.clip_high, pivot


def kl_estimate(gap: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """KL estimate of gap = ref_logp - logp and its derivative by logp."""
    d = gap.clamp(-KL_CLAMP, KL_CLAMP)
    if estimator == "k1":
        return -d, torch.ones_like(d)
    if estimator == "k2":
        return d * d / 2, -d
    return exp_minus_linear(d), -torch.expm1(d)


def exp_minus_linear(d: Tensor) -> Tensor:
    """exp(d) - 1 - d, by its series near 0, where the difference loses every digit."""
    near = bits(d.abs() < 0.05, d.dtype)
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720)))))
    return only(series, near) + only(torch.expm1(d) - d, ~near)


def bits(flags: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers of the size of a float `dtype`: all bits set where a flag is, none elsewhere."""
    return -flags.to(torch.int64 if dtype == torch.float64 else torch.int32)


def only(x: Tensor, chosen: Tensor) -> Tensor:
    """x where it is chosen, by `bits` of x's dtype, and exactly 0 elsewhere, NaN or not."""
    return (x.view(chosen.dtype) & chosen).view(x.dtype)


def segment_sums(values: Tensor, segments: RatioSegments) -> Tensor:
    """Sums [..., count] over segments of values [..., N]."""
    return index_sums(values, segments.index, segments.count)


def statistics(keep: Tensor, per_token: tuple[Tensor, ...], ratio: Tensor, center: Tensor) -> Tensor:
    """[len(STATS)] in the order of STATS; per_token are those between the number of tokens and the ratio."""
    count = keep.sum().to(ratio.dtype)
    n = count.clamp(min=1)
    kept = bits(keep, ratio.dtype)
    kept_ratio, kept_center = only(ratio, kept), only(center, kept)
    ratio_sum, square_sum = kept_ratio.sum(), kept_ratio.square().sum()
    zero = ratio_sum.new_zeros(())
    return torch.stack([
        count,
        *(only(x.to(ratio.dtype), kept).sum() / n for x in per_token),
        ratio_sum / n,
        kept_ratio.max() if keep.numel() else zero,
        kept_center.sum() / n,
        kept_center.max() if keep.numel() else zero,
        (ratio_sum / n) * (ratio_sum / torch.where(square_sum == 0, 1.0, square_sum)),
    ])  # fmt: skip

"""The PyTorch path: any device, float64 capable, no Triton; the CPU's default.

Log-probs work on a few rows of logits at a time, in place in two small buffers that stay in cache: a pass over
[N, V] reads the logits once and writes nothing of that size (forward) or the gradient (backward). Autograd never sees
the inner steps: every op has its gradient written out, as the Triton kernels have.

Numerics: float32 (float64 for float64 inputs); the row maximum and the log of the sum are kept apart, since their sum
loses digits when logits are large; 0·log 0 = 0 by clamping the exponent; the gradient at the target comes from the sum
of all other probabilities, which keeps its digits where p rounds to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import KL_CLAMP, PolicyLossConfig
from .common import LogitsTransform

CHUNK_ELEMENTS = 1 << 18
"""Scores handled at once: one float32 buffer of 1 MB, which stays in a core's L2 cache from step to step."""

MIN_EXPONENT = -200.0
"""exp of it is 0 in float32; keeps 0·(-inf) out of the entropy."""

LOWEST = -1e30
"""Stands for -inf in differences of log-probabilities."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, all else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_logprobs_forward(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitsTransform, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [B, L, V], targets [B, L], mask bool [B, L] or None -> logp, entropy (or empty), row_max, log_sum."""
    keep = kept(targets, mask, transform)
    shape, dtype = targets.shape, compute_dtype(logits.dtype)
    logp = logits.new_zeros(shape, dtype=dtype)
    row_max, log_sum = torch.zeros_like(logp), torch.zeros_like(logp)
    entropy = torch.zeros_like(logp) if with_entropy else logits.new_empty(0, dtype=dtype)
    inverse_t = _factor(transform)
    buffer = _buffer(logits, dtype)
    for b, rows in _chunks(keep, logits.shape[-1]):
        scores = _scores(logits[b], rows, transform, buffer)
        target = targets[b, rows].long().unsqueeze(-1)
        impossible = scores.gather(-1, target).squeeze(-1) == -torch.inf
        high = scores.amax(-1)
        high = torch.where(high == -torch.inf, 0.0, high)
        scores.sub_(high.unsqueeze(-1))
        if inverse_t != 1.0:
            scores.mul_(inverse_t)
        chosen = scores.gather(-1, target).squeeze(-1)
        if with_entropy:
            exponents = scores.clamp(min=MIN_EXPONENT)
        weights = scores.exp_()
        total = weights.sum(-1)
        log_total = total.log()
        # A finite logit has a finite log-prob, even where the difference to the maximum overflows.
        value = (chosen - log_total).clamp(min=torch.finfo(dtype).min)
        logp[b, rows] = torch.where(impossible, -torch.inf, value)
        row_max[b, rows] = high
        log_sum[b, rows] = log_total
        if with_entropy:
            spread = torch.linalg.vecdot(weights, exponents)
            entropy[b, rows] = torch.where(total == 0, 0.0, (log_total - spread / total).clamp(min=0))
    return logp, entropy, row_max, log_sum


def token_logprobs_backward(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    logp: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    transform: LogitsTransform,
    out: Tensor,
) -> None:
    """Write d(loss)/d(logits) into out [B, L, V], which may be the logits themselves."""
    # No direction for an impossible target; no distribution in an empty row.
    g = torch.where(logp > -torch.inf, grad_logp, 0.0)
    active = g != 0
    if grad_entropy is not None:
        h = torch.where(log_sum > -torch.inf, grad_entropy, 0.0)
        active = active | (h != 0)
    active = active & kept(targets, mask, transform)
    valid = transform.valid_vocab
    inverse_t = _factor(transform)
    buffer = _buffer(logits, compute_dtype(logits.dtype))
    for b, rows in _chunks(active, logits.shape[-1]):
        scores = _scores(logits[b], rows, transform, buffer)
        slope = _softcap_slope(logits[b], rows, transform)
        scores.sub_(row_max[b, rows].unsqueeze(-1))
        if inverse_t != 1.0:
            scores.mul_(inverse_t)
        scores.sub_(log_sum[b, rows].unsqueeze(-1))
        target = targets[b, rows].long().unsqueeze(-1)
        factor = -inverse_t * g[b, rows].unsqueeze(-1)
        if grad_entropy is not None:
            # d entropy / d score = -p·(log p + H)
            by_entropy = scores.clamp(min=MIN_EXPONENT).add_(entropy[b, rows].unsqueeze(-1))
            by_entropy.mul_(-inverse_t * h[b, rows].unsqueeze(-1))
        probs = scores.exp_()
        if grad_entropy is not None:
            by_entropy.mul_(probs)
        # 1 - p of the target as the sum of the others: exact to the last digits also where p rounds to 1.
        probs.scatter_(-1, target, 0.0)
        at_target = -probs.sum(-1, keepdim=True)
        grad = probs.scatter_(-1, target, at_target).mul_(factor)
        if grad_entropy is not None:
            grad.add_(by_entropy)
        if slope is not None:
            grad.mul_(slope)
        out[b, rows, :valid] = grad.to(out.dtype)
    # Last, since out may be the logits.
    if not active.all():
        out.masked_fill_(~active.unsqueeze(-1), 0)
    out[..., valid:] = 0


def kept(targets: Tensor, mask: Tensor | None, transform: LogitsTransform) -> Tensor:
    """Which tokens count, bool [B, L]."""
    keep = targets != transform.ignore_index
    return keep if mask is None else keep & mask


def _chunks(active: Tensor, vocab: int) -> Iterator[tuple[int, slice | Tensor]]:
    """Batch index and row index of a few active rows at a time; a slice where every row is active."""
    step = max(1, CHUNK_ELEMENTS // max(vocab, 1))
    for b in range(active.shape[0]):
        rows = active[b].nonzero().squeeze(-1)
        dense = rows.numel() == active.shape[1]
        for start in range(0, rows.numel(), step):
            stop = min(start + step, rows.numel())
            yield b, slice(start, stop) if dense else rows[start:stop]


def _buffer(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """One chunk of scores, allocated once: fresh memory would cost more than the arithmetic."""
    vocab = logits.shape[-1]
    rows = min(max(1, CHUNK_ELEMENTS // vocab), logits.shape[1])
    return logits.new_empty(rows * vocab, dtype=dtype)


def _scores(logits: Tensor, rows: slice | Tensor, transform: LogitsTransform, buffer: Tensor) -> Tensor:
    """Some rows' scores before temperature, in the buffer.

    Temperature (and the scale, without softcap) is applied after the row maximum is subtracted: finite logits then
    never become inf - inf.
    """
    source = logits[rows, : transform.valid_vocab]
    scores = buffer[: source.numel()].view(source.shape).copy_(source)
    if transform.softcap is None:
        return scores
    return scores.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap)


def _factor(transform: LogitsTransform) -> float:
    """What remains to be multiplied once the row maximum is subtracted."""
    return (transform.scale if transform.softcap is None else 1.0) / transform.temperature


def _softcap_slope(logits: Tensor, rows: slice | Tensor, transform: LogitsTransform) -> Tensor | None:
    """d score / d logit = scale·(1 - tanh²(u)) = scale·4w/(1 + w)² with w = exp(-2|u|): no digits lost near the cap."""
    if transform.softcap is None:
        return None
    u = logits[rows, : transform.valid_vocab].to(compute_dtype(logits.dtype)) * (transform.scale / transform.softcap)
    w = u.abs_().mul_(-2.0).exp_()
    return w.mul(4.0 * transform.scale).div_(w.add_(1.0).square_())


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
    config: PolicyLossConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unnormalised loss (0-d), its gradients for logp and entropy [N], statistics [len(STATS)] for tokens [N]."""
    dtype = compute_dtype(logp.dtype)
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask

    def clean(x: Tensor) -> Tensor:
        return torch.where(keep, x.to(dtype), 0.0)

    new = clean(logp)
    possible = new >= LOWEST
    new = new.clamp(min=LOWEST)
    old = new if old_logp is None else clean(old_logp).clamp(min=LOWEST)
    behavior = old if behavior_logp is None else clean(behavior_logp).clamp(min=LOWEST)
    adv = clean(advantages if advantage_index is None else advantages[advantage_index])
    w = keep.to(dtype) if weights is None else clean(weights)

    clamp = config.log_ratio_clamp
    raw = new - behavior
    movable = possible & (raw.abs() <= clamp)
    log_r, log_c = raw.clamp(-clamp, clamp), (old - behavior).clamp(-clamp, clamp)
    ratio, center = log_r.exp(), log_c.exp()
    lower, upper, pivot = clip_bounds(center, config)

    clip_low, clip_high = (adv < 0) & (ratio < lower), (adv > 0) & (ratio > upper)
    bound = torch.where(clip_low, lower, torch.where(clip_high, upper, ratio))
    clipped = clip_low | clip_high
    dual = torch.zeros_like(clipped)
    if config.dual_clip is not None:
        dual = (adv < 0) & (ratio > config.dual_clip * pivot)
        if not config.dual_clip_replay:
            dual &= old == behavior
        bound = torch.where(dual, config.dual_clip * pivot, bound)
        clipped = clipped | dual
    if config.weight_cap is not None:
        # min(c, cap)/c, in log space.
        bound = bound * (math.log(config.weight_cap) - log_c).clamp(max=0.0).exp()
    objective = bound * adv
    loss = -objective
    slope = torch.where(clipped | ~movable, 0.0, -objective)

    kl_ref = torch.zeros_like(loss)
    if ref_logp is not None:
        gap = clean(ref_logp).clamp(min=LOWEST) - new
        kl_ref, kl_slope = kl_estimate(gap, config.kl_estimator)
        kl_slope = torch.where(possible & (gap.abs() <= KL_CLAMP), kl_slope, 0.0)
        if config.kl_weighted:
            kl_slope = kl_slope * ratio + torch.where(movable, kl_ref * ratio, 0.0)
            kl_ref = kl_ref * ratio
        loss = loss + config.kl_coef * kl_ref
        slope = slope + config.kl_coef * kl_slope
    ent = torch.zeros_like(loss)
    grad_entropy = loss.new_empty(0)
    if entropy is not None:
        ent = clean(entropy)
        loss = loss - config.entropy_coef * ent
        grad_entropy = -config.entropy_coef * w
    loss_sum = (w * loss).sum()

    count = keep.sum().to(dtype)
    n = count.clamp(min=1)
    log_new = (new - old).clamp(-clamp, clamp)
    per_token = (clip_low, clip_high, dual, -log_new, exp_minus_linear(log_new), kl_ref, ent)
    kept_ratio, kept_center = torch.where(keep, ratio, 0.0), torch.where(keep, center, 0.0)
    ratio_sum = kept_ratio.sum()
    zero = ratio_sum.new_zeros(())
    stats = torch.stack([
        count,
        *(torch.where(keep, x, 0.0).sum() / n for x in per_token),
        ratio_sum / n,
        kept_ratio.max() if keep.numel() else zero,
        kept_center.sum() / n,
        kept_center.max() if keep.numel() else zero,
        ratio_sum**2 / (n * kept_ratio.square().sum()).clamp(min=1e-30),
    ])  # fmt: skip
    return loss_sum, w * slope, grad_entropy, stats


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
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720)))))
    return torch.where(d.abs() < 0.05, series, torch.expm1(d) - d)


def group_advantages(
    rewards: Tensor, groups: Tensor, baseline: str, scale: str | None, singleton: str, eps: float
) -> Tensor:
    """rewards [n], groups int [n] -> advantages [n], in float64 inside."""
    n = rewards.numel()
    order = torch.argsort(groups, stable=True)
    r, ids = rewards[order].double(), groups[order]
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    slot = starts.cumsum(0) - 1
    # Sums over groups go into n slots, enough for any number of groups: no size depends on the data.
    first = torch.zeros_like(r).index_put((slot[starts],), r[starts])
    size = torch.zeros_like(r).index_add(0, slot, torch.ones_like(r))[slot]
    shifted = r - first[slot]
    centered = shifted - torch.zeros_like(r).index_add(0, slot, shifted)[slot] / size
    others = (size - 1).clamp(min=1)
    result = centered * size / others if baseline == "leave_one_out" else centered
    if scale == "std":
        square_sum = torch.zeros_like(r).index_add(0, slot, centered.square())[slot]
        result = result / ((square_sum / others).sqrt() + eps)
    result = torch.where(size == 1, r if singleton == "raw" else torch.zeros_like(r), result)
    out = torch.empty_like(r)
    out[order] = result
    return out.to(compute_dtype(rewards.dtype)) if n else rewards.new_zeros(0, dtype=compute_dtype(rewards.dtype))

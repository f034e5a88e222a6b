"""Log-probs of targets and entropy from logits, and the gradient of the logits.

The work goes on a few rows of logits at a time, in place in two small buffers that stay in cache: a pass over
[N, V] reads the logits once and writes nothing of that size (forward) or the gradient (backward). Autograd never sees
the inner steps: every op has its gradient written out, as the Triton kernels have.

Numerics: float32 (float64 for float64 inputs); the row maximum and the log of the sum are kept apart, since their sum
loses digits when logits are large; 0·log 0 = 0 by clamping the exponent; the gradient at the target comes from the sum
of all other probabilities, which keeps its digits where p rounds to 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..common import LogitsTransform, compute_dtype, kept

CHUNK_ELEMENTS = 1 << 19
"""Scores handled at once: one float32 buffer of 2 MB, which stays in cache from step to step."""

MIN_EXPONENT = -200.0
"""exp of it is 0 in float32; keeps 0·(-inf) out of the entropy."""


def token_logprobs_forward(
    logits: Tensor, targets: Tensor, mask: Tensor | None, transform: LogitsTransform, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [B, L, V], targets [B, L], mask bool [B, L] or None -> logp, entropy (or empty), row_max, log_sum."""
    keep = kept(targets, mask, transform)
    shape, dtype = targets.shape, compute_dtype(logits.dtype)
    logp = logits.new_zeros(shape, dtype=dtype)
    row_max, log_sum = torch.zeros_like(logp), torch.zeros_like(logp)
    entropy = torch.zeros_like(logp) if with_entropy else logits.new_empty(0, dtype=dtype)
    inverse_t = transform.factor
    buffer = _buffer(logits, dtype)
    for b, rows in _chunks(keep, logits.shape[-1]):
        source = _source(logits[b], rows, transform, buffer)
        target = targets[b, rows].long().unsqueeze(-1)
        impossible = source.gather(-1, target).squeeze(-1) == -torch.inf
        high = source.amax(-1)
        high = torch.where(high == -torch.inf, 0.0, high)
        scores = torch.sub(source, high.unsqueeze(-1), out=_room(buffer, source))
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
        logp[b, rows] = torch.where(impossible & ~total.isnan(), -torch.inf, value)
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
    targets: Tensor | None,
    mask: Tensor | None,
    logp: Tensor,
    entropy: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    transform: LogitsTransform,
    out: Tensor,
) -> None:
    """Write d(loss)/d(logits) into out [B, L, V], which may be the logits themselves.

    Without targets every column is one that was not chosen (the targets' gradients are then written elsewhere).
    """
    # No direction for an impossible target; no distribution in an empty row.
    g = torch.where((logp == -torch.inf) & ~grad_logp.isnan(), 0.0, grad_logp)
    active = g != 0
    if grad_entropy is not None:
        h = torch.where(log_sum == -torch.inf, 0.0, grad_entropy)
        active = active | (h != 0)
    if targets is not None:
        active = active & kept(targets, mask, transform)
    elif mask is not None:
        active = active & mask
    valid = transform.valid_vocab
    inverse_t = transform.factor
    buffer = _buffer(logits, compute_dtype(logits.dtype))
    for b, rows in _chunks(active, logits.shape[-1]):
        source = _source(logits[b], rows, transform, buffer)
        slope = _softcap_slope(logits[b], rows, transform)
        scores = torch.sub(source, row_max[b, rows].unsqueeze(-1), out=_room(buffer, source))
        if inverse_t != 1.0:
            scores.mul_(inverse_t)
        by_entropy = None
        if grad_entropy is not None:
            # d entropy / d score = -p·(log p + H)
            by_entropy = scores.clamp(min=MIN_EXPONENT).add_((entropy - log_sum)[b, rows].unsqueeze(-1))
            by_entropy.mul_(-inverse_t * h[b, rows].unsqueeze(-1))
        # exp(score - max), to be divided by the row's sum: one pass less than probabilities.
        weights = scores.exp_()
        per_weight = torch.exp(-log_sum[b, rows]).unsqueeze(-1)
        factor = per_weight * (-inverse_t * g[b, rows].unsqueeze(-1))
        if by_entropy is not None:
            by_entropy.mul_(per_weight).mul_(weights)
        if targets is not None:
            # 1 - p of the target as the sum of the others: exact to the last digits also where p rounds to 1.
            target = targets[b, rows].long().unsqueeze(-1)
            weights.scatter_(-1, target, 0.0)
            weights.scatter_(-1, target, -weights.sum(-1, keepdim=True))
        if by_entropy is None and slope is None and isinstance(rows, slice) and out.dtype == weights.dtype:
            torch.mul(weights, factor, out=out[b, rows, :valid])
            continue
        grad = weights.mul_(factor)
        if by_entropy is not None:
            grad.add_(by_entropy)
        if slope is not None:
            grad.mul_(slope)
        out[b, rows, :valid] = grad.to(out.dtype)
    # Last, since out may be the logits.
    if not active.all():
        out.masked_fill_(~active.unsqueeze(-1), 0)
    out[..., valid:] = 0


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


def _source(logits: Tensor, rows: slice | Tensor, transform: LogitsTransform, buffer: Tensor) -> Tensor:
    """Some rows' scores before temperature: the logits themselves where they need no change, else in the buffer.

    Temperature (and the scale, without softcap) is applied after the row maximum is subtracted: finite logits then
    never become inf - inf.
    """
    source = logits[rows, : transform.valid_vocab]
    if transform.softcap is None and source.dtype == buffer.dtype:
        return source
    scores = _room(buffer, source).copy_(source)
    if transform.softcap is None:
        return scores
    return scores.mul_(transform.scale / transform.softcap).tanh_().mul_(transform.softcap)


def _room(buffer: Tensor, scores: Tensor) -> Tensor:
    """The buffer in the shape of the scores."""
    return buffer[: scores.numel()].view(scores.shape)


def _softcap_slope(logits: Tensor, rows: slice | Tensor, transform: LogitsTransform) -> Tensor | None:
    """d score / d logit of some rows, None without softcap."""
    if transform.softcap is None:
        return None
    return softcap_slope(logits[rows, : transform.valid_vocab].to(compute_dtype(logits.dtype)), transform)


def softcap_slope(logits: Tensor, transform: LogitsTransform) -> Tensor:
    """scale·(1 - tanh²(u)) = scale·4w/(1 + w)² with w = exp(-2|u|): no digits lost near the cap; 1 without one."""
    if transform.softcap is None:
        return torch.ones_like(logits)
    w = (logits * (transform.scale / transform.softcap)).abs_().mul_(-2.0).exp_()
    return w.mul(4.0 * transform.scale).div_(w.add_(1.0).square_())

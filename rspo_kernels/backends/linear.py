"""From hidden states and the lm_head's weight: a chunk of rows at a time, so that the logits never exist in full.

    logits = hidden·weightᵀ + bias          [chunk, V], then overwritten by their gradient
    grad_hidden = dlogits·weight            grad_weight += dlogitsᵀ·hidden          grad_bias += Σ dlogits

The driver is the same for both backends: matmuls are torch's, the work on a chunk's logits is the backend's. Without a
gradient a backend may have a kernel that makes log-probs without logits (Triton's, where descriptors fit the weight).

Exact sparsity: a masked row contributes nothing, and where there is no KL and no entropy term neither does a row whose
advantage or weight is 0; such rows stay out of the forward matmul (its cost is 2·V·H operations a row). Rows whose
gradient turns out 0 because they were clipped stay out of the two backward matmuls. What is left out is exactly 0.

Numerics: on the CPU bf16 and fp16 are computed in fp32 (without matrix units it is faster, too); elsewhere logits have
the dtype of hidden, as the model's own head makes them. grad_weight accumulates in fp32 over the chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import STATS, PolicyLossConfig
from . import Implementation, compose
from .common import LogitsTransform, RatioSegments, compute_dtype

CPU_CHUNK_ROWS = 256
GPU_CHUNK_ROWS = 2048
"""Fewer rows and the fp32 grad_weight's read and write would outweigh its matmul (they balance at about 1,200)."""
SLACK = 0.25
"""How much larger than these a chunk may be, so that a few rows too many do not cost a pass over the weight."""


@dataclass(frozen=True)
class Head:
    """hidden [N, H], weight [V, H], bias [V] or None, in the dtype of the matmuls; only valid_vocab rows of V count.

    chunk_rows: rows whose logits may exist at once; with `slack`, about so many.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk_rows: int
    slack: float = 0.0

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, valid: int, chunk_rows: int | None) -> Head:
        """In the matmuls' dtype, cut to the valid vocabulary."""
        weight, bias = weight[:valid], None if bias is None else bias[:valid]
        on_cpu = hidden.device.type == "cpu"
        if on_cpu:
            dtype = compute_dtype(hidden.dtype)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if chunk_rows is not None:
            return cls(hidden, weight, bias, chunk_rows, 0.0)
        return cls(hidden, weight, bias, CPU_CHUNK_ROWS if on_cpu else GPU_CHUNK_ROWS, SLACK)

    def buffer(self, rows: int) -> Tensor:
        """Room for a chunk's logits."""
        return self.hidden.new_empty(min(rows, int(self.chunk_rows * (1 + self.slack))), self.weight.shape[0])

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """hidden·weightᵀ + bias in the buffer, [1, rows, V] as the row functions take them."""
        out = torch.mm(hidden, self.weight.t(), out=buffer[: hidden.shape[0]])
        if self.bias is not None:
            out += self.bias
        return out.unsqueeze(0)

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, Tensor | slice]]:
        """Chunks of `rows` (bool [N]), of equal size as far as it goes: positions among the chosen ones, and which rows
        they are."""
        chosen = rows.nonzero().squeeze(-1)
        total, dense = chosen.numel(), chosen.numel() == rows.numel()
        pieces = max(1, math.ceil(total / self.chunk_rows - self.slack))
        for piece in range(pieces if total else 0):
            part = slice(total * piece // pieces, total * (piece + 1) // pieces)
            yield part, part if dense else chosen[part]


class Gradients:
    """Gradients of hidden, weight and bias, as far as they are wanted; empty tensors stand for the others."""

    def __init__(self, head: Head, vocab: int, wanted: tuple[bool, bool, bool], full_precision: bool) -> None:
        hidden, dtype = head.hidden, head.hidden.dtype
        accumulator = torch.float32 if full_precision and dtype != torch.float64 else dtype
        valid = head.weight.shape[0]
        self.head = head
        self.want_hidden, self.want_weight, self.want_bias = wanted
        self.hidden = hidden.new_zeros(hidden.shape) if self.want_hidden else hidden.new_empty(0)
        weight_shape = (vocab, hidden.shape[1]) if self.want_weight else (0,)
        self.total = hidden.new_empty(weight_shape, dtype=accumulator)
        self.total[valid:] = 0
        self.begun = False
        self.bias = hidden.new_zeros(vocab if self.want_bias else 0, dtype=compute_dtype(dtype))
        self.valid_weight, self.valid_bias = self.total[:valid], self.bias[:valid]

    @property
    def weight(self) -> Tensor:
        """The sum over the chunks. Zeros only where no chunk came: filling [V, H] first would cost a pass over it."""
        if not self.begun:
            self.total.zero_()
        return self.total

    def add(self, rows: Tensor | slice, dlogits: Tensor, hidden: Tensor, moved: Tensor) -> None:
        """Take in a chunk's gradient [n, V]; rows that are not `moved` (bool [n]) are zero and left out."""
        kept = moved.nonzero().squeeze(-1)
        if kept.numel() == 0:
            return
        if kept.numel() < moved.numel():
            dlogits, hidden = dlogits[kept], hidden[kept]
            rows = (
                torch.arange(rows.start, rows.stop, device=kept.device)[kept] if isinstance(rows, slice) else rows[kept]
            )
        if self.want_hidden:
            self.hidden[rows] = dlogits @ self.head.weight
        if self.want_weight:
            self._add_weight(dlogits.t(), hidden)
        if self.want_bias:
            self.valid_bias += dlogits.sum(0, dtype=self.bias.dtype)

    def _add_weight(self, transposed: Tensor, hidden: Tensor) -> None:
        """transposed [V, n], hidden [n, H]; the first chunk is written, the others are added."""
        same_dtype = self.total.dtype == hidden.dtype
        if not self.begun and same_dtype:
            torch.mm(transposed, hidden, out=self.valid_weight)
        elif not self.begun:
            self.valid_weight.copy_(transposed @ hidden)
        elif same_dtype:
            self.valid_weight.addmm_(transposed, hidden)
        else:
            self.valid_weight += transposed @ hidden
        self.begun = True


def token_logprobs_forward(
    impl: Implementation,
    head: Head,
    targets: Tensor,
    keep: Tensor,
    transform: LogitsTransform,
    with_entropy: bool,
    want_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """targets [N], keep bool [N] -> logp, entropy (or empty), row_max, log_sum; 0 where not kept.

    want_gradient: the state is for a backward pass, which makes the logits again: both then come from one matmul.
    """
    if not want_gradient and hasattr(impl, "linear_token_logprobs") and impl.fits_descriptors(head.hidden, head.weight):
        return impl.linear_token_logprobs(head.hidden, head.weight, head.bias, targets, keep, transform, with_entropy)
    dtype = compute_dtype(head.hidden.dtype)
    logp, row_max, log_sum = (head.hidden.new_zeros(targets.shape, dtype=dtype) for _ in range(3))
    entropy = head.hidden.new_zeros(targets.shape if with_entropy else 0, dtype=dtype)
    buffer = head.buffer(targets.numel())
    for _, rows in head.chunks(keep):
        logits = head.logits(head.hidden[rows], buffer)
        results = impl.token_logprobs_forward(logits, targets[rows].unsqueeze(0), None, transform, with_entropy)
        logp[rows], row_max[rows], log_sum[rows] = (x[0] for x in (results[0], results[2], results[3]))
        if with_entropy:
            entropy[rows] = results[1][0]
    return logp, entropy, row_max, log_sum


def token_logprobs_backward(
    impl: Implementation,
    head: Head,
    grads: Gradients,
    upstream: tuple[Tensor, Tensor | None],
    targets: Tensor,
    keep: Tensor,
    state: tuple[Tensor, ...],
    transform: LogitsTransform,
) -> None:
    """Add the gradients for upstream gradients [N] of the log-probs and (optionally) entropies to `grads`.

    state: what token_logprobs_forward gave.
    """
    moved = keep & (upstream[0] != 0)
    if upstream[1] is not None:
        moved = moved | (keep & (upstream[1] != 0))
    buffer = head.buffer(targets.numel())
    for _, rows in head.chunks(moved):
        hidden = head.hidden[rows]
        logits = head.logits(hidden, buffer)
        g, h = (None if x is None else x[rows].unsqueeze(0) for x in upstream)
        saved = (x[rows].unsqueeze(0) if x.numel() else x for x in state)
        impl.token_logprobs_backward(g, h, logits, targets[rows].unsqueeze(0), None, *saved, transform, logits)
        grads.add(rows, logits[0], hidden, moved[rows])


def policy_loss(
    impl: Implementation,
    head: Head,
    grads: Gradients,
    targets: Tensor,
    partners: tuple[Tensor | None, ...],
    segments: RatioSegments | None,
    transform: LogitsTransform,
    config: PolicyLossConfig,
    exact_stats: bool,
    with_entropy: bool,
    parts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss (0-d; the normalizer is in the weights) and statistics; adds the gradients to `grads`.

    partners: advantages, advantage_index, mask (required), weights (required), old_logp, behavior_logp, ref_logp.
    parts: bool [P, N], whose statistics are wanted, [P, S]; None: those of all rows, [S].
    """
    advantages, index, mask, weights, *logps = partners
    assert advantages is not None
    assert mask is not None
    assert weights is not None
    adv = advantages if index is None else advantages[index]
    if config.entropy_coef != 0:
        with_entropy = True
    rows_needed = mask
    if not exact_stats and config.kl_coef == 0 and config.entropy_coef == 0:
        # NaN must show, also where it would be multiplied by 0: in the sum of hidden states, or in a partner.
        broken = ~head.hidden.sum(-1).isfinite()
        for x in logps:
            broken = broken if x is None else broken | x.isnan()
        rows_needed = needed_rows(mask, adv, weights, broken, segments)
    want_gradient = grads.want_hidden or grads.want_weight or grads.want_bias

    def loss_of(logp: Tensor, entropy: Tensor, rows: Tensor = rows_needed) -> tuple[Tensor, ...]:
        given = entropy if with_entropy else None
        return impl.policy_loss_forward(logp, adv, None, rows, weights, *logps, given, segments, config)

    def stats_of(stats: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
        if parts is None:
            return with_token_count(stats, mask)
        each = [with_token_count(loss_of(logp, entropy, rows_needed & part)[3], mask & part) for part in parts]
        return torch.stack(each) if each else stats.new_empty(0, len(STATS))

    if segments is not None or not want_gradient:
        # One ratio for many rows: all log-probs come before any gradient, and the logits of moved rows come twice.
        state = token_logprobs_forward(impl, head, targets, rows_needed, transform, with_entropy, want_gradient)
        loss, slope, entropy_slope, stats = loss_of(*state[:2])
        if want_gradient:
            upstream = (slope, entropy_slope if config.entropy_coef != 0 else None)
            token_logprobs_backward(impl, head, grads, upstream, targets, rows_needed, state, transform)
        return loss, stats_of(stats, *state[:2])

    dtype = compute_dtype(head.hidden.dtype)
    logp = head.hidden.new_zeros(targets.shape, dtype=dtype)
    entropy = head.hidden.new_zeros(targets.shape if with_entropy else 0, dtype=dtype)
    buffer = head.buffer(targets.numel())
    for _, rows in head.chunks(rows_needed):
        hidden = head.hidden[rows]
        logits = head.logits(hidden, buffer)
        operands = (adv[rows], None, rows_needed[rows], weights[rows], *(None if x is None else x[rows] for x in logps))
        logp[rows], chunk_entropy, moved = compose.loss_rows_(
            impl, logits, targets[rows].unsqueeze(0), operands, transform, config, with_entropy
        )
        if with_entropy:
            entropy[rows] = chunk_entropy
        grads.add(rows, logits[0], hidden, moved)
    loss, _, _, stats = loss_of(logp, entropy)
    return loss, stats_of(stats, logp, entropy)


def needed_rows(mask: Tensor, adv: Tensor, weights: Tensor, broken: Tensor, segments: RatioSegments | None) -> Tensor:
    """Rows that can have a gradient when there is no KL and no entropy term, bool [N]; broken: those that hold NaN.

    A row whose ratio is shared is needed as long as any row of its segment has an advantage, or breaks the ratio.
    """
    speaks = mask & (weights != 0)
    if segments is None:
        return speaks & ((adv != 0) | broken | weights.isnan())
    moving = (speaks & ((adv != 0) | weights.isnan())) | (mask & broken)
    moving_segments = moving.new_zeros(segments.count, dtype=torch.int32)
    moving_segments.index_add_(0, segments.index, moving.to(torch.int32))
    return mask & (moving_segments > 0)[segments.index]


def with_token_count(stats: Tensor, mask: Tensor) -> Tensor:
    """Statistics with the number of all unmasked tokens, also those that were left out."""
    stats = stats.clone()
    stats[STATS.index("num_tokens")] = mask.sum()
    return stats

"""The policy loss from log-probabilities, from logits, and from hidden states: one loss, three places to begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks
from .backends.common import compute_dtype
from .backends.operators import ops
from .backends.operators.fused import scale_
from .backends.operators.registry import first_order_only, lead_to
from .config import STATS, PolicyLossConfig
from .logprobs import as_batch, batch_shape
from .loss_inputs import LossInputs, TokenGrid, check_config, per_token
from .segments import Segments

DEFAULT_CONFIG = PolicyLossConfig()


def policy_loss(
    logp: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    old_logp: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    segments: Segments | None = None,
    advantage_level: str | None = None,
    config: PolicyLossConfig = DEFAULT_CONFIG,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss with generalized clip centre (RSPO paper, eq. 1, 2 and 4), its gradient and statistics.

        loss = Σ mask·weights·loss_t / normalizer      with loss_t as in PolicyLossConfig

    On-policy and replayed tokens go into one call: an on-policy token has behavior_logp = old_logp, so its clip
    centre is 1; a replayed token has the log-prob under the policy that generated it. Gradients flow to logp and
    entropy only.

    Args:
        logp: [N] packed or [B, L] padded, log-probs under the current policy.
        advantages: of the shape of logp; or [B] for padded inputs; or one for each turn, sequence or set of `segments`.
        mask: of the shape of logp, bool or numbers (non-zero keeps). Masked tokens contribute exactly nothing and may
            hold anything.
        weights: of the shape of logp, factor of each token's loss, e.g. the mixture weights (1 - α)/n_on and α/n_off.
        normalizer: what the sum is divided by, a number or a 0-d tensor, finite and > 0. None: the number of unmasked
            tokens ("token-mean") or of sequences with an unmasked token (the other aggregations), at least 1. Pass
            the global count when accumulating over micro-batches. A tensor may be 0 where every token is masked (the
            loss is 0). Another tensor is a ValueError on the CPU, and a NaN loss elsewhere, where a check would wait
            for the device.
        old_logp: of the shape of logp, log-probs before this update. None: equal to logp.detach().
        behavior_logp: of the shape of logp, log-probs under the generating policy. None: equal to old_logp.
        ref_logp: of the shape of logp, log-probs under the reference policy; required when config.kl_coef > 0.
        entropy: of the shape of logp, differentiable; required when config.entropy_coef is not 0.
        segments: turns, sequences and sets of packed tokens; [B, L] inputs have one sequence for each row.
        advantage_level: "token", "turn", "sequence" or "set", what there is one advantage for. None: read off the
            number of advantages; where it fits several levels tokens come first, then the coarsest.
        config: what loss.
        backend: "auto", "torch" or "triton".

    Returns:
        loss: 0-d float32 (float64 for float64 logp), with a graph even where every token is masked (then 0).
        stats: detached 0-d tensors by the names of `STATS`; no host synchronisation.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape, device or range, named.
        RuntimeError: a backend that was asked for and cannot run here.
    """
    checks.floating("logp", logp)
    check_config(config)
    tokens = TokenGrid(tuple(logp.shape), logp.device, compute_dtype(logp.dtype), "logp")
    if config.entropy_coef != 0 and entropy is None:
        raise ValueError(f"entropy must be given with config.entropy_coef = {config.entropy_coef}, got None")
    if entropy is not None:
        per_token("entropy", entropy, tokens)
        entropy = entropy.reshape(-1)
    inputs = LossInputs.check(
        tokens,
        advantages,
        mask=mask,
        weights=weights,
        old_logp=old_logp,
        behavior_logp=behavior_logp,
        ref_logp=ref_logp,
        segments=segments,
        advantage_level=advantage_level,
        config=config,
        backend=backend,
    )
    flat = logp.reshape(-1)
    loss_sum, _, _, stats = ops.policy_loss(flat, *inputs.operands(), entropy, **inputs.settings(), backend=backend)
    lead_to(loss_sum, flat, entropy)
    named = dict(zip(STATS, stats.unbind(), strict=True))
    return loss_sum / inputs.denominator(normalizer, named["num_tokens"]), named


def logits_policy_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    valid_vocab: int | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    old_logp: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    segments: Segments | None = None,
    advantage_level: str | None = None,
    config: PolicyLossConfig = DEFAULT_CONFIG,
    with_entropy: bool = False,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    inplace: bool = False,
    validate: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss of token_logprobs in one op: the gradient of the logits is made in the forward pass.

    Args:
        logits: [N, V] or [B, L, V], any strides.
        targets: [N] or [B, L] int32 or int64; ignore_index counts as masked.
        temperature, softcap, logit_scale, valid_vocab, vocab_group, vocab_start, validate: as in token_logprobs.
        advantages, mask, weights, normalizer, old_logp, behavior_logp, ref_logp, segments, advantage_level, config:
            as in policy_loss, with the targets' shape for that of logp.
        with_entropy: report the entropy also where the loss has no entropy term (else that statistic is 0).
        inplace: write the gradient over the logits in the forward pass: no second tensor of that size, and the logits
            are gone. Only one backward pass then. torch.compile plans memory itself and leaves the logits alone.

    Returns, raises: as policy_loss.
    """
    checks.floating("logits", logits)
    checks.integer("targets", targets)
    if logits.dim() not in (2, 3):
        raise ValueError(f"logits must be [N, V] or [B, L, V], got {list(logits.shape)}")
    checks.same_shape("targets", targets, logits.shape[:-1], "logits without the last dimension")
    checks.same_device("targets", targets, logits.device, "logits")
    settings = checks.transform(
        logits.shape[-1],
        logit_scale,
        softcap,
        temperature,
        valid_vocab,
        ignore_index,
        vocab_group,
        vocab_start,
        logits.device,
    )
    partners = (mask, weights, old_logp, behavior_logp, ref_logp, segments, advantage_level, config, backend)
    inputs, operands = _fused_operands(targets, logits.dtype, advantages, normalizer, ignore_index, *partners)
    want_gradient = torch.is_grad_enabled() and logits.requires_grad
    rows = as_batch(logits, inplace)
    arguments = (targets.reshape(batch_shape(targets.shape)), *operands, *settings)
    tail = (*inputs.settings().values(), with_entropy, want_gradient, validate, backend)
    if inplace and want_gradient and not torch.compiler.is_compiling():
        loss, stats = _InplaceLogitsLoss.apply(rows, *arguments, *tail)
    else:
        loss, stats, _ = ops.logits_policy_loss(rows, *arguments, *tail)
    lead_to(loss, rows)
    return loss, dict(zip(STATS, stats.unbind(), strict=True))


class _InplaceLogitsLoss(torch.autograd.Function):
    """logits_policy_loss_ with its gradient, which lies where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, stats = ops.logits_policy_loss_(logits.detach(), *arguments)
        ctx.grad, ctx.num_arguments, ctx.backend = logits.detach(), len(arguments), arguments[-1]
        ctx.version = logits._version
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.grad is None:
            raise RuntimeError("logits_policy_loss with inplace=True allows one backward pass; its gradient is used up")
        if ctx.grad._version != ctx.version:
            raise RuntimeError(
                "logits_policy_loss with inplace=True keeps its gradient where the logits were, and something has been "
                "written there since; use each logits tensor for one such loss, and leave it alone until backward"
            )
        grad, ctx.grad = ctx.grad, None
        scale_(grad, grads[0], ctx.backend)
        return grad, *(None,) * ctx.num_arguments


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    valid_vocab: int | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    old_logp: Tensor | None = None,
    behavior_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    segments: Segments | None = None,
    advantage_level: str | None = None,
    config: PolicyLossConfig = DEFAULT_CONFIG,
    with_entropy: bool = False,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    exact_stats: bool = False,
    parts: Tensor | None = None,
    full_precision_weight_grad: bool = True,
    chunk_rows: int | None = None,
    validate: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """policy_loss of the logits hidden·weightᵀ + bias, which never exist in full; gradients made in the forward pass.

    Exact sparsity: masked rows enter no matmul; without KL and entropy terms neither do rows of zero advantage or
    weight, and clipped rows enter only the forward matmul. The results are those of the dense computation.

    Args:
        hidden: [N, H] or [B, L, H]. weight: [V, H] of the same dtype; bias: [V] or None. Gradients are made for those
            that require one (a frozen head costs no matmul for its gradient).
        targets: [N] or [B, L] int32 or int64; ignore_index counts as masked.
        temperature, softcap, logit_scale, valid_vocab, vocab_group, vocab_start, validate: as in
            linear_token_logprobs.
        advantages, mask, weights, normalizer, old_logp, behavior_logp, ref_logp, segments, advantage_level, config:
            as in policy_loss, with the targets' shape for that of logp.
        with_entropy: report the entropy also where the loss has no entropy term (else that statistic is 0).
        exact_stats: compute statistics over all unmasked rows. False: rows that need no matmul are left out of them
            (num_tokens counts them all the same).
        parts: bool [P, N] or [P, B, L], e.g. which rows are on-policy and which are replayed: statistics are then [P],
            over the unmasked rows of each part. A part consists of whole segments where rows share a ratio. The loss is
            over all rows whatever the parts are, and its gradients are made and held once.
        full_precision_weight_grad: sum the weight's gradient over chunks in float32 rather than in the weight's dtype
            (on the CPU, where everything is computed in float32, it always is).
        chunk_rows: rows whose logits exist at once, at most; None: 256 on the CPU, 2048 elsewhere, or up to a quarter
            more where that saves a chunk.

    Returns, raises: as policy_loss.
    """
    flat, weight, bias, _ = checks.lm_head(hidden, weight, bias, targets)
    settings = checks.transform(
        weight.shape[0],
        logit_scale,
        softcap,
        temperature,
        valid_vocab,
        ignore_index,
        vocab_group,
        vocab_start,
        flat.device,
    )
    checks.chunk_rows(chunk_rows)
    if parts is not None:
        parts = _parts(parts, targets)
    partners = (mask, weights, old_logp, behavior_logp, ref_logp, segments, advantage_level, config, backend)
    inputs, operands = _fused_operands(targets, flat.dtype, advantages, normalizer, ignore_index, *partners)
    graph = torch.is_grad_enabled()
    wanted = (graph and x is not None and x.requires_grad for x in (flat, weight, bias))
    loss, stats, *_ = ops.linear_policy_loss(
        flat,
        weight,
        bias,
        targets.reshape(-1),
        *operands,
        *settings,
        *inputs.settings().values(),
        with_entropy,
        exact_stats,
        parts,
        validate,
        *wanted,
        full_precision_weight_grad,
        chunk_rows,
        backend,
    )
    lead_to(loss, flat, weight, bias)
    return loss, dict(zip(STATS, stats.unbind(-1), strict=True))


def _parts(parts: Tensor, targets: Tensor) -> Tensor:
    """The checked parts as bool [P, N]."""
    checks.plain_tensor("parts", parts)
    if parts.dtype != torch.bool:
        raise TypeError(f"parts must be a bool tensor, got {parts.dtype}")
    if parts.dim() != targets.dim() + 1 or parts.shape[1:] != targets.shape:
        raise ValueError(f"parts must be [P, {', '.join(map(str, targets.shape))}], got {list(parts.shape)}")
    checks.same_device("parts", parts, targets.device, "targets")
    return parts.flatten(1)


def _fused_operands(
    targets: Tensor,
    dtype: torch.dtype,
    advantages: Tensor,
    normalizer: Tensor | float | None,
    ignore_index: int,
    mask: Tensor | None,
    weights: Tensor | None,
    old_logp: Tensor | None,
    behavior_logp: Tensor | None,
    ref_logp: Tensor | None,
    segments: Segments | None,
    advantage_level: str | None,
    config: PolicyLossConfig,
    backend: str,
) -> tuple[LossInputs, tuple[Any, ...]]:
    """Operands of a fused loss, with the normalizer in the weights, so that gradients made on the way are final."""
    inputs = LossInputs.check(
        TokenGrid(tuple(targets.shape), targets.device, compute_dtype(dtype), "targets"),
        advantages,
        mask=mask,
        weights=weights,
        old_logp=old_logp,
        behavior_logp=behavior_logp,
        ref_logp=ref_logp,
        segments=segments,
        advantage_level=advantage_level,
        config=config,
        backend=backend,
        ignored=targets == ignore_index,
    )
    scale = torch.ones_like(inputs.kept) if inputs.weights is None else inputs.weights
    operands = list(inputs.operands())
    operands[3] = scale / inputs.denominator(normalizer)
    return inputs, tuple(operands)

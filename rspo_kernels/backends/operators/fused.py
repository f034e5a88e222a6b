"""The operators of the fused losses: from logits, and from hidden states and the lm_head's weight.

Their gradients are made in the forward pass, while the logits are at hand; the backward pass scales them by the
upstream gradient, which costs nothing where that is 1. The normalizer is part of the weights, so that the loss that
comes out is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...config import STATS
from .. import compose, implementation, linear, resolve, vocab_parallel
from ..common import LogitsTransform, compute_dtype, kept
from .registry import (
    CONFIG_SCHEMA,
    NUM_CONFIG,
    NUM_TOKENS,
    NUM_TRANSFORM,
    STATE_SCHEMA,
    TOKENS_SCHEMA,
    TRANSFORM_SCHEMA,
    check_targets,
    config_of,
    define,
    must_check_targets,
    ops,
    ratio_segments,
)

_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_WANTED = "bool want_hidden, bool want_weight, bool want_bias, bool full_precision, int? chunk_rows, str backend"
_ROWS = f"Tensor targets, {TOKENS_SCHEMA}, {TRANSFORM_SCHEMA}, {CONFIG_SCHEMA}, bool with_entropy"


def _split(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], LogitsTransform, Any, tuple[Any, ...]]:
    """Arguments from the advantages on as token operands, transform, config, and the rest."""
    a, b, c = NUM_TOKENS, NUM_TOKENS + NUM_TRANSFORM, NUM_TOKENS + NUM_TRANSFORM + NUM_CONFIG
    return arguments[:a], LogitsTransform(*arguments[a:b]), config_of(arguments[b:c]), arguments[c:]


# linear_token_logprobs


def _linear_token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, with_entropy, want_gradient, validate, chunk_rows, backend = arguments
    transform = LogitsTransform(*values)
    chosen = resolve(backend, hidden.device, hidden.dtype)
    if must_check_targets(validate, chosen):
        check_targets(targets, mask, transform)
    head = linear.Head.of(hidden, weight, bias, transform.valid_vocab, chunk_rows)
    keep = kept(targets, mask, transform)
    return linear.token_logprobs_forward(
        implementation(chosen, transform), head, targets, keep, transform, with_entropy, want_gradient
    )


def _linear_token_logprobs_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(hidden.dtype)
    logp, row_max, log_sum = (hidden.new_empty(targets.shape, dtype=dtype) for _ in range(3))
    return logp, hidden.new_empty(targets.shape if arguments[-5] else 0, dtype=dtype), row_max, log_sum


def _linear_token_logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, mask, *ctx.transform, _, _, _, ctx.chunk_rows, ctx.backend = inputs
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, mask, *output)


def _linear_token_logprobs_autograd(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (ctx.num_inputs - 3)
    saved = ctx.saved_tensors
    logp, entropy = saved[5:7]
    if entropy.numel() != logp.numel():
        grad_entropy = None
    if grad_logp is None:
        if grad_entropy is None:
            return (None, None, None, *nothing)
        grad_logp = torch.zeros_like(logp)
    wanted = ctx.needs_input_grad[:3]
    grads = ops.linear_token_logprobs_backward(
        grad_logp, grad_entropy, *saved, *ctx.transform, *wanted, True, ctx.chunk_rows, ctx.backend
    )
    return (*(_like(g, x, want) for g, x, want in zip(grads, saved[:3], wanted, strict=True)), *nothing)


def _like(grad: Tensor, x: Tensor | None, wanted: bool) -> Tensor | None:
    return grad.to(x.dtype) if wanted and x is not None else None


def _linear_token_logprobs_backward(
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    state, transform = arguments[:4], LogitsTransform(*arguments[4 : 4 + NUM_TRANSFORM])
    *wanted, full_precision, chunk_rows, backend = arguments[4 + NUM_TRANSFORM :]
    impl = implementation(resolve(backend, hidden.device, hidden.dtype), transform)
    head = linear.Head.of(hidden, weight, bias, transform.valid_vocab, chunk_rows)
    grads = linear.Gradients(head, weight.shape[0], tuple(wanted), full_precision)
    keep = kept(targets, mask, transform)
    linear.token_logprobs_backward(impl, head, grads, (grad_logp, grad_entropy), targets, keep, state, transform)
    vocab_parallel.add_up(grads.hidden, transform)
    return grads.hidden, grads.weight, grads.bias


def _linear_token_logprobs_backward_fake(
    grad_logp: Tensor, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(hidden, weight, *arguments[-6:-2])


def _fake_gradients(
    hidden: Tensor, weight: Tensor, want_hidden: bool, want_weight: bool, want_bias: bool, full_precision: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(hidden.dtype) if hidden.device.type == "cpu" else hidden.dtype
    accumulator = torch.float32 if full_precision and dtype != torch.float64 else dtype
    return (
        hidden.new_empty(hidden.shape if want_hidden else 0, dtype=dtype),
        hidden.new_empty(weight.shape if want_weight else 0, dtype=accumulator),
        hidden.new_empty(weight.shape[0] if want_bias else 0, dtype=compute_dtype(dtype)),
    )


# linear_policy_loss


def _linear_policy_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (*partners, index, share, count), transform, config, rest = _split(arguments)
    with_entropy, exact_stats, parts, validate, *wanted, full_precision, chunk_rows, backend = rest
    chosen = resolve(backend, hidden.device, hidden.dtype)
    if must_check_targets(validate, chosen):
        check_targets(targets, partners[2], transform)
    head = linear.Head.of(hidden, weight, bias, transform.valid_vocab, chunk_rows)
    grads = linear.Gradients(head, weight.shape[0], tuple(wanted), full_precision)
    impl, segments = implementation(chosen, transform), ratio_segments(index, share, count)
    loss, stats = linear.policy_loss(
        impl, head, grads, targets, tuple(partners), segments, transform, config, exact_stats, with_entropy, parts
    )
    vocab_parallel.add_up(grads.hidden, transform)
    return loss, stats, grads.hidden, grads.weight, grads.bias


def _linear_policy_loss_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rest = _split(arguments)[3]
    dtype = compute_dtype(hidden.dtype)
    parts = rest[2]
    shape = (len(STATS),) if parts is None else (parts.shape[0], len(STATS))
    loss, stats = hidden.new_empty((), dtype=dtype), hidden.new_empty(shape, dtype=dtype)
    return loss, stats, *_fake_gradients(hidden, weight, *rest[4:8])


def _linear_policy_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.num_inputs, ctx.backend, ctx.factor = len(inputs), inputs[-1], None
    ctx.save_for_backward(*output[2:])


def _linear_policy_loss_autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * ctx.num_inputs
    if grad_loss is not None:
        # All of them, whichever this pass asks for: a later one may ask for the others.
        for i, (grad, dtype) in enumerate(zip(scaled(ctx, ctx.saved_tensors, grad_loss), ctx.dtypes, strict=True)):
            if ctx.needs_input_grad[i] and dtype is not None:
                grads[i] = grad.to(dtype)
    return tuple(grads)


def scaled(ctx: Any, grads: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """grads·factor, without a copy in a graph's first backward pass as far as the backend and the factor allow.

    ctx: with the `backend` and the `factor` that the gradients have been scaled by in place, None before.
    """
    # A tracer's stand-ins for tensors have types of their own: no value to look at, no memory to write to.
    if type(factor) is not Tensor:
        return [grad * factor for grad in grads]
    if ctx.factor is not None:
        if float(ctx.factor) == 0.0:
            raise RuntimeError(
                "the first backward pass through this loss had an upstream gradient of 0, which is all that is left of"
                " its gradients; compute the loss again for another backward pass"
            )
        return [grad * (factor / ctx.factor) for grad in grads]
    if resolve(ctx.backend, factor.device, factor.dtype) == "triton":
        ctx.factor = factor.clone()
        for grad in grads:
            scale_(grad, factor, ctx.backend)
        return grads
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return grads
    return [grad * factor for grad in grads]


def scale_(grad: Tensor, factor: Tensor, backend: str) -> None:
    """grad·factor in place; on Triton without a look from the host, and nothing is moved where the factor is 1."""
    chosen = resolve(backend, grad.device, grad.dtype)
    if chosen == "triton" and type(factor) is Tensor:
        implementation(chosen).scale_(grad, factor)
    elif grad.device.type != "cpu" or type(factor) is not Tensor or float(factor) != 1.0:
        grad.mul_(factor)


# logits_policy_loss


def _logits_policy_loss(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_gradient = arguments[-3]
    out = torch.empty(logits.shape if want_gradient else 0, dtype=logits.dtype, device=logits.device)
    loss, stats = _rows_loss(logits, *arguments, out=out)
    return loss, stats, out


def _logits_policy_loss_(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    result = _rows_loss(logits, *arguments, out=logits)
    torch.autograd.graph.increment_version(logits)
    return result


def _rows_loss(logits: Tensor, targets: Tensor, *values: Any, out: Tensor) -> tuple[Tensor, Tensor]:
    (*partners, index, share, count), transform, config, rest = _split(values)
    with_entropy, want_gradient, validate, backend = rest
    chosen = resolve(backend, logits.device, logits.dtype)
    if must_check_targets(validate, chosen):
        check_targets(targets, partners[2].view(targets.shape), transform)
    impl = implementation(chosen, transform)
    arguments = (transform, config, with_entropy or config.entropy_coef != 0, out if want_gradient else None)
    segments = ratio_segments(index, share, count)
    if segments is None and hasattr(impl, "logits_policy_loss"):
        return impl.logits_policy_loss(logits, targets, tuple(partners), *arguments)
    # A ratio that many rows share is known when all rows have been read: their gradient needs a second look.
    return compose.logits_policy_loss(impl, logits, targets, tuple(partners), segments, *arguments)


def _logits_policy_loss_fake(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_gradient = arguments[-3]
    dtype = compute_dtype(logits.dtype)
    grad = torch.empty(logits.shape if want_gradient else 0, dtype=logits.dtype, device=logits.device)
    return logits.new_empty((), dtype=dtype), logits.new_empty(len(STATS), dtype=dtype), grad


def _logits_policy_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.num_inputs, ctx.backend, ctx.factor = len(inputs), inputs[-1], None
    ctx.save_for_backward(output[2])


def _logits_policy_loss_autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (ctx.num_inputs - 1)
    return (None if grad_loss is None else scaled(ctx, ctx.saved_tensors, grad_loss)[0], *rest)


define(
    "linear_token_logprobs",
    f"({_HEAD}, Tensor? mask, {TRANSFORM_SCHEMA}, bool with_entropy, bool want_gradient, bool? validate, "
    f"int? chunk_rows, str backend) -> ({STATE_SCHEMA})",
    _linear_token_logprobs,
    _linear_token_logprobs_fake,
    _linear_token_logprobs_autograd,
    _linear_token_logprobs_setup,
)
define(
    "linear_token_logprobs_backward",
    f"(Tensor grad_logp, Tensor? grad_entropy, {_HEAD}, Tensor? mask, {STATE_SCHEMA}, {TRANSFORM_SCHEMA}, {_WANTED}) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    _linear_token_logprobs_backward,
    _linear_token_logprobs_backward_fake,
)
define(
    "linear_policy_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, {_ROWS}, bool exact_stats, Tensor? parts, bool? validate, "
    f"{_WANTED}) "
    "-> (Tensor loss, Tensor stats, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    _linear_policy_loss,
    _linear_policy_loss_fake,
    _linear_policy_loss_autograd,
    _linear_policy_loss_setup,
)
define(
    "logits_policy_loss",
    f"(Tensor logits, {_ROWS}, bool want_gradient, bool? validate, str backend) "
    "-> (Tensor loss, Tensor stats, Tensor grad_logits)",
    _logits_policy_loss,
    _logits_policy_loss_fake,
    _logits_policy_loss_autograd,
    _logits_policy_loss_setup,
)
define(
    "logits_policy_loss_",
    f"(Tensor(a!) logits, {_ROWS}, bool want_gradient, bool? validate, str backend) -> (Tensor loss, Tensor stats)",
    _logits_policy_loss_,
    lambda logits, *arguments: _logits_policy_loss_fake(logits, *arguments)[:2],
)

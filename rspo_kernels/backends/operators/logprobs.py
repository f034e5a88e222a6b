"""Operators of token_logprobs: forward, backward, and backward in place of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import implementation, resolve
from ..common import LogitsTransform, compute_dtype
from .registry import NUM_TRANSFORM, STATE_SCHEMA, TRANSFORM_SCHEMA, check_targets, define, must_check_targets, ops


def _token_logprobs(
    logits: Tensor, targets: Tensor, mask: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *values, with_entropy, _, validate, backend = arguments
    chosen, transform = resolve(backend, logits.device, logits.dtype), LogitsTransform(*values)
    if must_check_targets(validate, chosen):
        check_targets(targets, mask, transform)
    return implementation(chosen, transform).token_logprobs_forward(logits, targets, mask, transform, with_entropy)


def _token_logprobs_fake(logits: Tensor, targets: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with_entropy = arguments[-4]
    dtype = compute_dtype(logits.dtype)
    row = [logits.new_empty(targets.shape, dtype=dtype) for _ in range(4)]
    if not with_entropy:
        row[1] = logits.new_empty(0, dtype=dtype)
    return row[0], row[1], row[2], row[3]


def _token_logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, mask, *ctx.transform, _, ctx.inplace, _, ctx.backend = inputs
    ctx.num_inputs = len(inputs)
    logp, entropy, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, mask, logp, entropy, row_max, log_sum)


def _token_logprobs_autograd(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (ctx.num_inputs - 1)
    logits, targets, mask, logp, entropy, row_max, log_sum = ctx.saved_tensors
    if entropy.numel() != logp.numel():
        grad_entropy = None
    if grad_logp is None:
        if grad_entropy is None:
            return (None, *nothing)
        grad_logp = torch.zeros_like(logp)
    backward = ops.token_logprobs_backward_ if ctx.inplace else ops.token_logprobs_backward
    arguments = (grad_logp, grad_entropy, logits, targets, mask, logp, entropy, row_max, log_sum)
    grad = backward(*arguments, *ctx.transform, ctx.backend)
    return (logits if ctx.inplace else grad, *nothing)


def _token_logprobs_backward(grad_logp: Tensor, grad_entropy: Tensor | None, logits: Tensor, *rest: Any) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _write_logits_gradient(grad_logp, grad_entropy, logits, *rest, out=out)
    return out


def _token_logprobs_backward_(grad_logp: Tensor, grad_entropy: Tensor | None, logits: Tensor, *rest: Any) -> None:
    _write_logits_gradient(grad_logp, grad_entropy, logits, *rest, out=logits)
    # A kernel's write is invisible to autograd, which must refuse to use the old logits afterwards.
    torch.autograd.graph.increment_version(logits)


def _write_logits_gradient(
    grad_logp: Tensor, grad_entropy: Tensor | None, logits: Tensor, *rest: Any, out: Tensor
) -> None:
    saved, transform = rest[: -NUM_TRANSFORM - 1], LogitsTransform(*rest[-NUM_TRANSFORM - 1 : -1])
    impl = implementation(resolve(rest[-1], logits.device, logits.dtype), transform)
    impl.token_logprobs_backward(grad_logp, grad_entropy, logits, *saved, transform, out)


def _token_logprobs_backward_fake(grad_logp: Tensor, grad_entropy: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


_BACKWARD_INPUTS = (
    "Tensor grad_logp, Tensor? grad_entropy, {logits} logits, Tensor targets, Tensor? mask, "
    f"{STATE_SCHEMA}, {TRANSFORM_SCHEMA}, str backend"
)
define(
    "token_logprobs",
    f"(Tensor logits, Tensor targets, Tensor? mask, {TRANSFORM_SCHEMA}, bool with_entropy, bool inplace, "
    f"bool? validate, str backend) -> ({STATE_SCHEMA})",
    _token_logprobs,
    _token_logprobs_fake,
    _token_logprobs_autograd,
    _token_logprobs_setup,
)
define(
    "token_logprobs_backward",
    f"({_BACKWARD_INPUTS.replace('{logits}', 'Tensor')}) -> Tensor",
    _token_logprobs_backward,
    _token_logprobs_backward_fake,
)
define(
    "token_logprobs_backward_",
    f"({_BACKWARD_INPUTS.replace('{logits}', 'Tensor(a!)')}) -> ()",
    _token_logprobs_backward_,
    lambda *_: None,
)

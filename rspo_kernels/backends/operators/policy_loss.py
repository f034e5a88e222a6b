"""The operator of policy_loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...config import STATS
from .. import implementation, resolve
from ..common import compute_dtype
from .registry import CONFIG_SCHEMA, TOKENS_SCHEMA, config_of, define, ratio_segments


def _policy_loss(logp: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *partners, segment_index, segment_share, segment_count = arguments[:10]
    entropy, *values, backend = arguments[10:]
    impl = implementation(resolve(backend, logp.device, logp.dtype))
    segments = ratio_segments(segment_index, segment_share, segment_count)
    return impl.policy_loss_forward(logp, *partners, entropy, segments, config_of(values))


def _policy_loss_fake(logp: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entropy = arguments[10]
    dtype = compute_dtype(logp.dtype)
    grad_entropy = logp.new_empty(0 if entropy is None else logp.shape, dtype=dtype)
    stats = logp.new_empty(len(STATS), dtype=dtype)
    return logp.new_empty((), dtype=dtype), logp.new_empty(logp.shape, dtype=dtype), grad_entropy, stats


def _policy_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad_logp, grad_entropy, stats = output
    ctx.logp_dtype, ctx.num_inputs = inputs[0].dtype, len(inputs)
    ctx.entropy_dtype = None if inputs[11] is None else inputs[11].dtype
    ctx.mark_non_differentiable(grad_logp, grad_entropy, stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad_logp, grad_entropy)


def _policy_loss_autograd(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * ctx.num_inputs
    if grad_loss is not None:
        grad_logp, grad_entropy = ctx.saved_tensors
        grads[0] = (grad_logp * grad_loss).to(ctx.logp_dtype)
        if ctx.entropy_dtype is not None:
            grads[11] = (grad_entropy * grad_loss).to(ctx.entropy_dtype)
    return tuple(grads)


define(
    "policy_loss",
    f"(Tensor logp, {TOKENS_SCHEMA}, Tensor? entropy, {CONFIG_SCHEMA}, str backend) "
    "-> (Tensor loss_sum, Tensor grad_logp, Tensor grad_entropy, Tensor stats)",
    _policy_loss,
    _policy_loss_fake,
    _policy_loss_autograd,
    _policy_loss_setup,
)

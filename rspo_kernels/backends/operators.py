"""The torch.library operators: one opaque operator for each op, with fake and autograd rules.

An operator looks at its tensors and its `backend` argument when it runs and calls the PyTorch path or the Triton
kernel; torch.compile sees one node either way. `Library.define` costs about 6 µs a call where `custom_op` costs 40.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import STATS, PolicyLossConfig
from . import implementation, resolve
from .common import LogitsTransform, RatioSegments, compute_dtype
from .torch_impl.logprobs import kept

NAMESPACE = "rspo_kernels"
_library = torch.library.Library(NAMESPACE, "DEF")

_TRANSFORM = "float scale, float? softcap, float temperature, int valid_vocab, int ignore_index"
_CONFIG = (
    "str loss, float clip_low, float clip_high, str clip_center, float? center_cap, float? weight_cap, "
    "float? dual_clip, bool dual_clip_replay, float kl_coef, str kl_estimator, bool kl_weighted, float entropy_coef, "
    "str ratio_level, float sapo_tau_positive, float sapo_tau_negative, float log_ratio_clamp"
)
_CONFIG_NAMES = [part.split()[-1] for part in _CONFIG.split(", ")]
_TOKENS = (
    "Tensor advantages, Tensor? advantage_index, Tensor? mask, Tensor? weights, Tensor? old_logp, "
    "Tensor? behavior_logp, Tensor? ref_logp, Tensor? segment_index, Tensor? segment_share, SymInt segment_count"
)
_BACKWARD_INPUTS = (
    "Tensor grad_logp, Tensor? grad_entropy, {logits} logits, Tensor targets, Tensor? mask, Tensor logp, "
    "Tensor entropy, Tensor row_max, Tensor log_sum, " + _TRANSFORM + ", str backend"
)
_SCHEMAS = {
    "token_logprobs": (
        f"(Tensor logits, Tensor targets, Tensor? mask, {_TRANSFORM}, bool with_entropy, bool inplace, "
        "bool? validate, str backend) -> (Tensor logp, Tensor entropy, Tensor row_max, Tensor log_sum)"
    ),
    "token_logprobs_backward": f"({_BACKWARD_INPUTS.format(logits='Tensor')}) -> Tensor",
    "token_logprobs_backward_": f"({_BACKWARD_INPUTS.format(logits='Tensor(a!)')}) -> ()",
    "policy_loss": (
        f"(Tensor logp, {_TOKENS}, Tensor? entropy, {_CONFIG}, str backend) "
        "-> (Tensor loss_sum, Tensor grad_logp, Tensor grad_entropy, Tensor stats)"
    ),
    "group_advantages": (
        "(Tensor rewards, Tensor groups, str baseline, str? scale, str singleton, float eps, bool validate, "
        "str backend) -> Tensor"
    ),
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)

ops = torch.ops.rspo_kernels


def config_arguments(config: PolicyLossConfig) -> dict[str, Any]:
    """The fields of the config that the policy_loss operator takes."""
    return {name: getattr(config, name) for name in _CONFIG_NAMES}


# token_logprobs


def _token_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    valid_vocab: int,
    ignore_index: int,
    with_entropy: bool,
    inplace: bool,
    validate: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = resolve(backend, logits.device, logits.dtype)
    transform = LogitsTransform(scale, softcap, temperature, valid_vocab, ignore_index)
    # The PyTorch path would fail inside gather; the Triton kernels give NaN without reading out of bounds.
    if validate or (validate is None and chosen == "torch"):
        _check_targets(targets, mask, transform)
    return implementation(chosen).token_logprobs_forward(logits, targets, mask, transform, with_entropy)


def _check_targets(targets: Tensor, mask: Tensor | None, transform: LogitsTransform) -> None:
    wrong = kept(targets, mask, transform) & ((targets < 0) | (targets >= transform.valid_vocab))
    if wrong.any():
        row = int(wrong.flatten().nonzero()[0])
        raise ValueError(
            f"targets must lie in 0 .. {transform.valid_vocab - 1} where not masked (or be ignore_index = "
            f"{transform.ignore_index}), got {int(targets.flatten()[row])} at flat position {row}"
        )


def _token_logprobs_fake(logits: Tensor, targets: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with_entropy = args[6]
    dtype = compute_dtype(logits.dtype)
    row = [logits.new_empty(targets.shape, dtype=dtype) for _ in range(4)]
    if not with_entropy:
        row[1] = logits.new_empty(0, dtype=dtype)
    return row[0], row[1], row[2], row[3]


def _token_logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, mask, *transform = inputs[:8]
    ctx.transform, ctx.inplace, ctx.backend = transform, inputs[9], inputs[11]
    logp, entropy, row_max, log_sum = output
    ctx.mark_non_differentiable(row_max, log_sum)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, mask, logp, entropy, row_max, log_sum)


def _token_logprobs_autograd(
    ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 11
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
    *saved, scale, softcap, temperature, valid_vocab, ignore_index, backend = rest
    transform = LogitsTransform(scale, softcap, temperature, valid_vocab, ignore_index)
    impl = implementation(resolve(backend, logits.device, logits.dtype))
    impl.token_logprobs_backward(grad_logp, grad_entropy, logits, *saved, transform, out)


def _token_logprobs_backward_fake(grad_logp: Tensor, grad_entropy: Tensor | None, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


# policy_loss


def _policy_loss(logp: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *partners, segment_index, segment_share, segment_count = arguments[:10]
    entropy, *values, backend = arguments[10:]
    impl = implementation(resolve(backend, logp.device, logp.dtype))
    segments = ratio_segments(segment_index, segment_share, segment_count)
    return impl.policy_loss_forward(logp, *partners, entropy, segments, _config(values))


def ratio_segments(index: Tensor | None, share: Tensor | None, count: int) -> RatioSegments | None:
    """The three operands as one, None where every token has its own ratio."""
    return None if index is None or share is None else RatioSegments(index, share, count)


def _config(values: Sequence[Any]) -> PolicyLossConfig:
    return PolicyLossConfig(**dict(zip(_CONFIG_NAMES, values, strict=True)))


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


# group_advantages


def _group_advantages(
    rewards: Tensor,
    groups: Tensor,
    baseline: str,
    scale: str | None,
    singleton: str,
    eps: float,
    validate: bool,
    backend: str,
) -> Tensor:
    if validate and not bool(rewards.isfinite().all()):
        i = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(f"rewards must be finite, got {float(rewards[i])} at position {i} (group {int(groups[i])})")
    impl = implementation(resolve(backend, rewards.device, rewards.dtype))
    return impl.group_advantages(rewards, groups, baseline, scale, singleton, eps)


def _group_advantages_fake(rewards: Tensor, *_: Any) -> Tensor:
    return rewards.new_empty(rewards.shape, dtype=compute_dtype(rewards.dtype))


def _register(name: str, run: Any, fake: Any) -> None:
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


_register("token_logprobs", _token_logprobs, _token_logprobs_fake)
_register("token_logprobs_backward", _token_logprobs_backward, _token_logprobs_backward_fake)
_register("token_logprobs_backward_", _token_logprobs_backward_, lambda *_: None)
_register("policy_loss", _policy_loss, _policy_loss_fake)
_register("group_advantages", _group_advantages, _group_advantages_fake)
torch.library.register_autograd(
    f"{NAMESPACE}::token_logprobs", _token_logprobs_autograd, setup_context=_token_logprobs_setup, lib=_library
)
torch.library.register_autograd(
    f"{NAMESPACE}::policy_loss", _policy_loss_autograd, setup_context=_policy_loss_setup, lib=_library
)

"""The library that all operators are registered in, and the pieces of schema that several of them share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...config import PolicyLossConfig
from ..common import LogitsTransform, RatioSegments, kept

NAMESPACE = "rspo_kernels"
library = torch.library.Library(NAMESPACE, "DEF")
ops = torch.ops.rspo_kernels

TRANSFORM_SCHEMA = (
    "float scale, float? softcap, float temperature, int valid_vocab, int ignore_index, str vocab_group, "
    "int vocab_start"
)
STATE_SCHEMA = "Tensor logp, Tensor entropy, Tensor row_max, Tensor log_sum"
TOKENS_SCHEMA = (
    "Tensor advantages, Tensor? advantage_index, Tensor? mask, Tensor? weights, Tensor? old_logp, "
    "Tensor? behavior_logp, Tensor? ref_logp, Tensor? segment_index, Tensor? segment_share, SymInt segment_count"
)
CONFIG_SCHEMA = (
    "str loss, float clip_low, float clip_high, str clip_center, float? center_cap, float? weight_cap, "
    "float? dual_clip, bool dual_clip_replay, float kl_coef, str kl_estimator, bool kl_weighted, float entropy_coef, "
    "str ratio_level, float sapo_tau_positive, float sapo_tau_negative, float log_ratio_clamp"
)
NUM_TRANSFORM, NUM_TOKENS, NUM_CONFIG = (
    len(schema.split(", ")) for schema in (TRANSFORM_SCHEMA, TOKENS_SCHEMA, CONFIG_SCHEMA)
)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")
_CONFIG_NAMES = [part.split()[-1] for part in CONFIG_SCHEMA.split(", ")]


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
) -> None:
    """Register an operator: schema, implementation (for every device), fake rule and, optionally, its gradient.

    Its body and its gradient are out of reach of the caller's autocast, and the gradient can be taken once.
    """
    library.define(name + schema)
    library.impl(name, without_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if backward is not None:
        gradient = first_order_only(without_autocast(backward))
        torch.library.register_autograd(f"{NAMESPACE}::{name}", gradient, setup_context=setup, lib=library)


def without_autocast(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body` with autocast off on every device: inside an operator dtypes are chosen by hand."""

    @functools.wraps(body)
    def run(*arguments: Any) -> Any:
        kinds = [kind for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)]
        if not kinds:
            return body(*arguments)
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return body(*arguments)

    return run


class _NoSecondOrder(torch.autograd.Function):
    """Gradients that say no when somebody differentiates them."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "the ops of rspo_kernels are differentiable once: their gradients (create_graph=True) have no gradient; "
            "use rspo_kernels.reference for second derivatives"
        )


def first_order_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A backward function whose results raise when they are differentiated, rather than count as constants."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        present = [grad.detach().requires_grad_() for grad in results if grad is not None]
        reached = [x for x in (*getattr(ctx, "inputs", ()), *grads) if x is not None and x.requires_grad]
        guarded = iter(_NoSecondOrder.apply(len(present), *present, *reached))
        return tuple(None if grad is None else next(guarded) for grad in results)

    return run


def lead_to(result: Tensor, *inputs: Tensor | None) -> None:
    """Have the graph of the gradients of `result` lead back to the inputs, so that the error there cannot be missed.

    What is kept of an input is an empty slice of it: where it stands in the graph, and not its memory.
    """
    # Compiled graphs refuse second derivatives by themselves.
    if torch.compiler.is_compiling() or not isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction):
        return
    node: Any = result.grad_fn
    node.inputs = [x.narrow(0, 0, 0).clone() for x in inputs if x is not None and x.requires_grad]


def config_arguments(config: PolicyLossConfig) -> dict[str, Any]:
    """The fields of the config that the operators take."""
    return {name: getattr(config, name) for name in _CONFIG_NAMES}


def config_of(values: Sequence[Any]) -> PolicyLossConfig:
    """The config back from its fields."""
    return PolicyLossConfig(**dict(zip(_CONFIG_NAMES, values, strict=True)))


def ratio_segments(index: Tensor | None, share: Tensor | None, count: int) -> RatioSegments | None:
    """The three operands as one, None where every token has its own ratio."""
    return None if index is None or share is None else RatioSegments(index, share, count)


def check_targets(targets: Tensor, mask: Tensor | None, transform: LogitsTransform) -> None:
    """Raise ValueError for a target outside the valid vocabulary (reads them on the host)."""
    if transform.vocab_group:
        return  # each process knows its own part only; the parts are compared where they meet
    wrong = kept(targets, mask, transform) & ((targets < 0) | (targets >= transform.valid_vocab))
    if wrong.any():
        row = int(wrong.flatten().nonzero()[0])
        raise ValueError(
            f"targets must lie in 0 .. {transform.valid_vocab - 1} where not masked (or be ignore_index = "
            f"{transform.ignore_index}), got {int(targets.flatten()[row])} at flat position {row}"
        )


def must_check_targets(validate: bool | None, backend: str) -> bool:
    """The PyTorch path would fail inside gather; the Triton kernels give NaN without reading out of bounds."""
    return bool(validate) or (validate is None and backend == "torch")

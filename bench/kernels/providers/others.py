"""cut-cross-entropy, flash-attn's cross-entropy, unsloth's chunked log-probs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..imports import load
from ..workloads import Inputs
from . import Function, provider
from .eager import clipped_loss


def _cut_cross_entropy(implementation: str) -> Callable[[Inputs, Tensor], Tensor]:
    function = load("cut_cross_entropy").linear_cross_entropy

    def logprobs(x: Inputs, targets: Tensor) -> Tensor:
        return -function(x.hidden, x.weight, targets, reduction="none", impl=implementation)

    return logprobs


def _register_cut_cross_entropy(implementation: str, devices: tuple[str, ...]) -> None:
    name = f"cut-cross-entropy, {implementation}"
    filtered = "small gradients are dropped" if implementation == "cce" else ""

    def load_logprobs() -> Function:
        logprobs = _cut_cross_entropy(implementation)
        return lambda x: {"logp": logprobs(x, x.targets)}

    def load_loss() -> Function:
        logprobs = _cut_cross_entropy(implementation)

        def run(x: Inputs) -> dict[str, Tensor]:
            assert x.old_logp is not None
            logp = logprobs(x, torch.where(x.mask, x.targets, -100))
            return {"loss": clipped_loss(torch.where(x.mask, logp, x.old_logp), x.old_logp, x.advantages, x.keep)}

        return run

    provider("linear_token_logprobs", name, "cce", devices=devices, compiled=True, note=filtered)(load_logprobs)
    provider("linear_policy_loss", name, "cce", devices=devices, compiled=True, note=filtered)(load_loss)


_register_cut_cross_entropy("torch_compile", ("cpu", "cuda"))
_register_cut_cross_entropy("cce", ("cuda",))


def _flash() -> Callable[[Inputs], Tensor]:
    function = load("flash_attn.ops.triton.cross_entropy").cross_entropy_loss
    return lambda x: -function(x.logits, x.targets, inplace_backward=False)[0]


@provider("token_logprobs", "flash-attn cross_entropy_loss", "flash-attn", devices=("cuda",))
def _flash_logprobs() -> Function:
    logprobs = _flash()
    return lambda x: {"logp": logprobs(x)}


@provider("logits_policy_loss", "flash-attn cross_entropy_loss", "flash-attn", devices=("cuda",))
def _flash_loss() -> Function:
    logprobs = _flash()

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.old_logp is not None
        return {"loss": clipped_loss(logprobs(x), x.old_logp, x.advantages, x.keep)}

    return run


def _unsloth() -> Callable[[Inputs], Tensor]:
    function = load("unsloth_zoo.rl_replacements").chunked_hidden_states_selective_log_softmax

    def logprobs(x: Inputs) -> Tensor:
        assert x.hidden is not None
        return function(x.view(x.hidden), x.weight, x.view(x.targets)).reshape(-1)

    return logprobs


@provider("linear_token_logprobs", "unsloth chunked", "unsloth", devices=("cuda",), compiled=True)
def _unsloth_logprobs() -> Function:
    logprobs = _unsloth()
    return lambda x: {"logp": logprobs(x)}


@provider("linear_policy_loss", "unsloth chunked", "unsloth", devices=("cuda",), compiled=True)
def _unsloth_loss() -> Function:
    logprobs = _unsloth()

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.old_logp is not None
        return {"loss": clipped_loss(logprobs(x), x.old_logp, x.advantages, x.keep)}

    return run

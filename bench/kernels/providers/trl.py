"""TRL: selective_log_softmax and its fused log-prob and entropy (Triton on CUDA, PyTorch elsewhere), chunked log-probs.

The loss after the log-probs is the trainer's inline PyTorch, which is `eager.clipped_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from ..imports import load
from ..workloads import Inputs
from . import Function, provider
from .eager import clipped_loss

CHUNK = 8192
"""Vocabulary columns of a tile, the trainer's value."""


def _utils() -> ModuleType:
    return load("trl.trainer.utils", without=("datasets", "pandas"))


def _chunked_logprobs() -> Callable[..., Any]:
    """ChunkedLogProbFunction.apply; its backward pass imports the utilities."""
    _utils()
    return load("trl.kernels.chunked_logprob").ChunkedLogProbFunction.apply


@provider("token_logprobs", "trl selective_log_softmax", "trl", note="CUDA: computes the entropy besides")
def _selective() -> Function:
    function = _utils().selective_log_softmax
    return lambda x: {"logp": function(x.logits, x.targets)}


@provider("token_logprobs + entropy", "trl selective_log_softmax_and_entropy", "trl")
def _selective_entropy() -> Function:
    function = _utils().selective_log_softmax_and_entropy

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy = function(x.logits, x.targets)
        return {"logp": logp, "entropy": entropy}

    return run


@provider("logits_policy_loss", "trl selective_log_softmax", "trl", note="CUDA: computes the entropy besides")
def _logits_loss() -> Function:
    function = _utils().selective_log_softmax

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.old_logp is not None
        return {"loss": clipped_loss(function(x.logits, x.targets), x.old_logp, x.advantages, x.keep)}

    return run


@provider("linear_token_logprobs", "trl chunked", "trl")
def _chunked() -> Function:
    apply = _chunked_logprobs()
    return lambda x: {"logp": apply(x.hidden, x.weight, None, x.targets, 1.0, CHUNK, None, 1.0, ())[0]}


@provider("linear_token_logprobs + entropy", "trl chunked", "trl")
def _chunked_entropy() -> Function:
    apply = _chunked_logprobs()

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy, *_ = apply(x.hidden, x.weight, None, x.targets, 1.0, CHUNK, None, 1.0, ("entropy",))
        return {"logp": logp, "entropy": entropy}

    return run


@provider("linear_policy_loss", "trl chunked", "trl", note="masked rows selected, which TRL does on CUDA only")
def _linear_loss() -> Function:
    apply = _chunked_logprobs()

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.hidden is not None
        assert x.old_logp is not None
        rows = x.mask.nonzero().squeeze(-1)
        logp = apply(x.hidden[rows], x.weight, None, x.targets[rows], 1.0, CHUNK, None, 1.0, ())[0]
        return {"loss": clipped_loss(logp, x.old_logp[rows], x.advantages[rows], x.keep[rows])}

    return run

"""TRL: selective_log_softmax and its fused log-prob and entropy (Triton on CUDA, PyTorch elsewhere), chunked log-probs.

Logits are [B, L, V], as its trainers have them: off CUDA its loop goes over the first dimension. The loss after
the log-probs is the trainer's inline PyTorch, which is `eager.clipped_loss`.
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


def _utils() -> ModuleType:
    return load("trl.trainer.utils", without=("datasets", "pandas"))


def _chunked_logprobs(*outputs: str) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """(hidden, weight, targets) -> log-probs and what else, in tiles as wide as the trainer's."""
    columns = _utils()._CHUNKED_LOGPROB_CHUNK_SIZE
    apply = load("trl.kernels.chunked_logprob").ChunkedLogProbFunction.apply
    return lambda hidden, weight, targets: apply(hidden, weight, None, targets, 1.0, columns, None, 1.0, outputs)


@provider("token_logprobs", "trl selective_log_softmax", "trl", note="CUDA: computes the entropy besides")
def _selective() -> Function:
    function = _utils().selective_log_softmax
    return lambda x: {"logp": function(x.view(x.logits), x.view(x.targets)).flatten()}


@provider("token_logprobs + entropy", "trl selective_log_softmax_and_entropy", "trl")
def _selective_entropy() -> Function:
    function = _utils().selective_log_softmax_and_entropy

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy = function(x.view(x.logits), x.view(x.targets))
        return {"logp": logp.flatten(), "entropy": entropy.flatten()}

    return run


@provider("logits_policy_loss", "trl selective_log_softmax", "trl", note="CUDA: computes the entropy besides")
def _logits_loss() -> Function:
    function = _utils().selective_log_softmax

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.old_logp is not None
        logp = function(x.view(x.logits), x.view(x.targets), row_mask=x.view(x.mask)).flatten()
        return {"loss": clipped_loss(logp, x.old_logp, x.advantages, x.keep)}

    return run


@provider("linear_token_logprobs", "trl chunked", "trl")
def _chunked() -> Function:
    apply = _chunked_logprobs()
    return lambda x: {"logp": apply(x.hidden, x.weight, x.targets)[0]}


@provider("linear_token_logprobs + entropy", "trl chunked", "trl")
def _chunked_entropy() -> Function:
    apply = _chunked_logprobs("entropy")

    def run(x: Inputs) -> dict[str, Tensor]:
        logp, entropy, *_ = apply(x.hidden, x.weight, x.targets)
        return {"logp": logp, "entropy": entropy}

    return run


@provider("linear_policy_loss", "trl chunked", "trl", note="masked rows selected, which TRL does on CUDA only")
def _linear_loss() -> Function:
    apply = _chunked_logprobs()

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.hidden is not None
        assert x.old_logp is not None
        rows = x.mask.nonzero().squeeze(-1)
        logp = apply(x.hidden[rows], x.weight, x.targets[rows])[0]
        return {"loss": clipped_loss(logp, x.old_logp[rows], x.advantages[rows], x.keep[rows])}

    return run

"""The peers' Triton kernels on a case of the traffic suite, as their own trainers call them.

A peer that cannot be imported, or whose kernels do not run in the interpreter, raises when its work is done; the suite
records why.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .cases import CONFIG, ENTROPY_SLOPE, TEMPERATURE, Case, Results, Work

PACKAGES = {"liger": "liger-kernel", "trl": "trl", "cce": "cut-cross-entropy", "verl": "verl"}
"""Names as --peers takes them, and the distributions they stand for."""

REFUSALS = {"verl": "does not run in the interpreter: its kernels assert that their tensors are CUDA's"}
"""Peers that have Triton kernels for this work and whose launchers refuse the interpreter's tensors."""


def liger_grpo_loss(case: Case, *, inplace: bool) -> Work:
    """Forward and backward kernel. The logits have a row more per sequence, which the loss does not use."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = _with_last_row(case.logits).requires_grad_()
    mask = case.mask.int()
    options: dict[str, Any] = {
        "temperature": TEMPERATURE,
        "beta": 0.0,
        "eps_low": CONFIG.clip_low,
        "eps_high": CONFIG.clip_high,
        "loss_type": "bnpo",
        "reduce": True,
        "inplace": inplace,
    }

    def work() -> Results:
        loss, _ = triton_grpo_loss(logits, case.old_logp, None, case.targets, case.advantages, mask, **options)
        (grad,) = torch.autograd.grad(loss, logits)
        return {"loss": loss, "grad": grad[:, :-1]}

    return work


def liger_logprobs(case: Case) -> Work:
    """Log-probs without gradient, for the old and the reference policy."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    logits, mask = _with_last_row(case.logits), case.mask.int()

    def work() -> Results:
        return {"logp": fused_selective_log_softmax(logits, case.targets, TEMPERATURE, mask)}

    return work


def trl_logprobs(case: Case, *, gradient: bool, entropy: bool) -> Work:
    """Its kernel makes the entropy in any case; without `entropy` nothing is done with it."""
    from trl.kernels import selective_log_softmax_and_entropy

    logits = case.logits.clone().requires_grad_(gradient)
    upstream = [case.expected["slope"].float(), torch.full(case.mask.shape, ENTROPY_SLOPE)][: 1 + entropy]

    def work() -> Results:
        outputs = selective_log_softmax_and_entropy(logits, case.targets, TEMPERATURE, case.mask)[: 1 + entropy]
        results = dict(zip(("logp", "entropy"), outputs, strict=False))
        if gradient:
            (grad,) = torch.autograd.grad(outputs, logits, upstream)
            results["grad_with_entropy" if entropy else "grad"] = grad
        return results

    return work


def trl_grpo_loss(case: Case) -> Work:
    """Its log-prob kernels with the trainer's loss on the vectors of tokens between them."""
    from trl.kernels import selective_log_softmax_and_entropy

    logits = case.logits.clone().requires_grad_()

    def work() -> Results:
        logp, _ = selective_log_softmax_and_entropy(logits, case.targets, TEMPERATURE, case.mask)
        loss = _clipped_loss(case, logp, case.mask, case.old_logp, case.advantages[:, None])
        (grad,) = torch.autograd.grad(loss, logits)
        return {"loss": loss, "grad": grad}

    return work


def trl_linear_logprobs(case: Case, *, chunk: int) -> Work:
    """Projection by tiles of the vocabulary, folded into running statistics; unmasked tokens only, as it does."""
    apply = _trl_chunked()

    def work() -> Results:
        assert case.hidden is not None
        with torch.no_grad():
            logp = apply(
                case.hidden[case.mask], case.weight, None, case.targets[case.mask], TEMPERATURE, chunk, None, 1.0, ()
            )[0]
        return {"logp": torch.zeros(case.mask.shape).masked_scatter(case.mask, logp)}

    return work


def trl_linear_grpo_loss(case: Case, *, chunk: int) -> Work:
    apply = _trl_chunked()
    assert case.hidden is not None
    assert case.weight is not None
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()

    def work() -> Results:
        logp = apply(
            hidden[case.mask], weight, None, case.targets[case.mask], TEMPERATURE, chunk, None, 1.0, ("entropy",)
        )[0]
        logp = logp.new_zeros(case.mask.shape).masked_scatter(case.mask, logp)
        loss = _clipped_loss(case, logp, case.mask, case.old_logp, case.advantages[:, None])
        grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
        return {"loss": loss, "grad_hidden": grad_hidden, "grad_weight": grad_weight}

    return work


def cce_linear_logprobs(case: Case) -> Work:
    """Its loss is -logp, at temperature 1: that is divided out of hidden beforehand."""
    import triton.language as tl
    from cut_cross_entropy import linear_cross_entropy, tl_utils

    tl_utils.tl_libdevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    assert case.hidden is not None
    hidden = case.hidden / TEMPERATURE
    targets = torch.where(case.mask, case.targets, -100)

    def work() -> Results:
        with torch.no_grad():
            return {"logp": -linear_cross_entropy(hidden, case.weight, targets, reduction="none")}

    return work


def _clipped_loss(case: Case, logp: Tensor, mask: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logp - old_logp).exp()
    bounded = ratio.clamp(1 - CONFIG.clip_low, 1 + CONFIG.clip_high)
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()


def _with_last_row(logits: Tensor) -> Tensor:
    return torch.cat([logits, logits[:, -1:]], 1)


def _trl_chunked() -> Any:
    """TRL's chunked log-probs with its Triton kernels, which it takes on accelerators only."""
    chunked = import_module("trl.kernels.chunked_logprob")
    chunked._use_triton = lambda device: True  # type: ignore[attr-defined]
    try:
        import_module("trl.trainer.utils")
    except ImportError:
        # All that the kernels need of it gathers sharded weights; the rest of the module needs datasets and pandas.
        stand_in = ModuleType("trl.trainer.utils")
        stand_in.maybe_gather_lm_head_ctx = lambda *tensors: nullcontext()  # type: ignore[attr-defined]
        sys.modules["trl.trainer.utils"] = stand_in
    return chunked.ChunkedLogProbFunction.apply

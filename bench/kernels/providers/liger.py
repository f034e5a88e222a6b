"""Liger-Kernel: the chunked fused-linear GRPO loss (PyTorch) and the GRPO loss from logits (Triton)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..imports import load
from ..workloads import CLIP, Inputs
from . import Function, provider

CHUNK_ROWS = 512
"""Tokens of a chunk at least, if sequences are shorter: by default a chunk is one sequence, which suits long ones."""


def _fused_linear(compiled: bool) -> Function:
    kind = load("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
    settings = {"beta": 0.0, "use_ref_model": False, "epsilon_low": CLIP, "epsilon_high": CLIP, "loss_type": "dapo"}

    @cache
    def loss(length: int) -> Callable[..., Any]:
        return kind(compiled=compiled, chunk_size=max(1, CHUNK_ROWS // length), **settings)

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.hidden is not None
        assert x.old_logp is not None
        result, _ = loss(x.workload.length)(
            x.view(x.hidden),
            x.weight,
            x.view(x.targets),
            x.view(x.keep),
            x.sequence_advantages,
            old_per_token_logps=x.view(x.old_logp),
        )
        return {"loss": result}

    return run


@provider("linear_policy_loss", "liger fused linear", "liger", note="one advantage a sequence")
def _linear() -> Function:
    return _fused_linear(compiled=False)


@provider("linear_policy_loss", "liger fused linear, compiled", "liger", compiled=True, note="one advantage a sequence")
def _linear_compiled() -> Function:
    return _fused_linear(compiled=True)


def _one_more_column(x: Inputs) -> Inputs:
    """Logits [B, L + 1, V], whose last column is not used."""
    assert x.logits is not None
    logits = x.view(x.logits.detach())
    padded = torch.cat([logits, torch.zeros_like(logits[:, :1])], 1).requires_grad_()
    return replace(x, logits=padded)


@provider(
    "logits_policy_loss",
    "liger triton",
    "liger",
    devices=("cuda",),
    prepare=_one_more_column,
    note="one advantage a sequence; gradient not in place",
)
def _logits() -> Function:
    function = load("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def run(x: Inputs) -> dict[str, Tensor]:
        assert x.old_logp is not None
        result, _ = function(
            x.logits,
            x.view(x.old_logp),
            None,
            x.view(x.targets),
            x.sequence_advantages,
            completion_mask=x.view(x.keep),
            temperature=1.0,
            beta=0.0,
            eps_low=CLIP,
            eps_high=CLIP,
            inplace=False,
            loss_type="dapo",
            reduce=True,
        )
        return {"loss": result}

    return run

"""TRL's losses in the words of `rspo_kernels`: which formula, and what sums of token losses are divided by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from rspo_kernels import PolicyLossConfig

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo")
LEVELS = ("token", "sequence")


def default_args(model: Any, method: str) -> GRPOConfig:
    """What TRL takes where no arguments are given: the defaults, in a folder that is named after the model, a name or
    a model object, and the method."""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return GRPOConfig(f"{name.split('/')[-1]}-{method}")


def loss_config(args: GRPOConfig) -> PolicyLossConfig:
    """The loss that `args` describe.

    Raises ValueError that names what this loss cannot honour, with the value and what is possible.
    """
    _check(args)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    common = {
        "ratio_level": args.importance_sampling_level,
        "kl_coef": args.beta,
        "kl_weighted": bool(args.use_bias_correction_kl),
        "aggregation": "seq-mean-token-mean" if args.loss_type in ("grpo", "sapo") else "token-mean",
    }
    if args.loss_type == "sapo":
        taus = {"sapo_tau_positive": args.sapo_temperature_pos, "sapo_tau_negative": args.sapo_temperature_neg}
        return PolicyLossConfig(loss="sapo", **taus, **common)
    if args.loss_type == "cispo":
        # TRL's bound is epsilon_high itself, without a lower one: the interval is 0 .. 1 + (epsilon_high - 1).
        return PolicyLossConfig(loss="cispo", clip_low=1.0, clip_high=high - 1, **common)
    return PolicyLossConfig(loss="grpo", clip_low=args.epsilon, clip_high=high, dual_clip=args.delta, **common)


def _check(args: GRPOConfig) -> None:
    """Refuse what would silently be something else."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    _must(args.loss_type in LOSS_TYPES, "loss_type", args.loss_type, f"one of {', '.join(map(repr, LOSS_TYPES))}")
    level = args.importance_sampling_level
    _must(level in LEVELS, "importance_sampling_level", level, "'token' or 'sequence'")
    if args.loss_type == "cispo":
        _must(high >= 1, "epsilon_high", high, "at least 1 with loss_type 'cispo', whose bound on the ratio it is")
    if args.delta is not None:
        _must(args.loss_type in CLIPPED, "delta", args.delta, f"None with loss_type {args.loss_type!r}")
        _must(args.delta > 1 + high, "delta", args.delta, f"above 1 + epsilon_high = {1 + high:g}, or None")
    _must(
        args.top_entropy_quantile == 1, "top_entropy_quantile", args.top_entropy_quantile,
        "1.0: the entropies are known only together with the loss",
    )  # fmt: skip
    _must(
        args.off_policy_mask_threshold is None, "off_policy_mask_threshold", args.off_policy_mask_threshold,
        "None: the log-probs are known only together with the loss",
    )  # fmt: skip
    _must(args.entropy_coef == 0, "entropy_coef", args.entropy_coef, "0")
    _must(not args.use_adaptive_entropy, "use_adaptive_entropy", args.use_adaptive_entropy, "False")
    _must(
        not args.fp16, "fp16", args.fp16, "False: gradients are made before fp16's loss scale is known; bf16 needs none"
    )


def _must(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted} (the fused policy loss), got {value!r}")


def divisor(loss_type: str, rows: int, tokens: Tensor, horizon: int) -> Tensor:
    """What makes a mean of a sum over `rows` completions with `tokens` (0-d) unmasked tokens, 0-d float32.

    grpo and sapo divide each completion's sum by its length before (`aggregation`); dr_grpo divides by `horizon`
    tokens for each completion.
    """
    if loss_type in ("bnpo", "dapo", "cispo"):
        return tokens.float().clamp(min=1)
    size = rows * horizon if loss_type == "dr_grpo" else rows
    return torch.full((), float(size), device=tokens.device)

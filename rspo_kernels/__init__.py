"""Fused policy-optimisation ops for language-model agents: Triton kernels, a lean PyTorch path, a plain reference."""

from .advantages import (
    StepAdvantages,
    anchor_ids,
    discounted_returns,
    gae,
    group_advantages,
    masked_whiten,
    step_advantages,
)
from .config import STATS, PolicyLossConfig
from .logprobs import linear_token_logprobs, token_logprobs
from .policy_loss import linear_policy_loss, logits_policy_loss, policy_loss
from .segments import Segments

__all__ = [
    "STATS",
    "PolicyLossConfig",
    "Segments",
    "StepAdvantages",
    "anchor_ids",
    "discounted_returns",
    "gae",
    "group_advantages",
    "linear_policy_loss",
    "linear_token_logprobs",
    "logits_policy_loss",
    "masked_whiten",
    "policy_loss",
    "step_advantages",
    "token_logprobs",
]

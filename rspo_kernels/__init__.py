"""Fused policy-optimisation ops for language-model agents: Triton kernels, a lean PyTorch path, a plain reference."""

from .advantages import group_advantages
from .config import STATS, PolicyLossConfig
from .logprobs import token_logprobs
from .policy_loss import policy_loss
from .segments import Segments

__all__ = ["STATS", "PolicyLossConfig", "Segments", "group_advantages", "policy_loss", "token_logprobs"]

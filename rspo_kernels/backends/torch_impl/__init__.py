"""The PyTorch path: any device, float64 capable, no Triton; the CPU's default.

Autograd never sees the inner steps: every op has its gradient written out, as the Triton kernels have.
"""

from .advantages import group_advantages
from .fused import logits_policy_loss
from .logprobs import token_logprobs_backward, token_logprobs_forward
from .policy_loss import policy_loss_forward

__all__ = [
    "group_advantages",
    "logits_policy_loss",
    "policy_loss_forward",
    "token_logprobs_backward",
    "token_logprobs_forward",
]

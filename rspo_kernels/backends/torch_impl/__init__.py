"""The PyTorch path: any device, float64 capable, no Triton; the CPU's default.

Autograd never sees the inner steps: every op has its gradient written out, as the Triton kernels have.
"""

from .advantages import group_advantages, step_advantages
from .logprobs import token_logprobs_backward, token_logprobs_forward
from .policy_loss import policy_loss_forward
from .scans import discounted_returns, gae, masked_whiten

__all__ = [
    "discounted_returns",
    "gae",
    "group_advantages",
    "masked_whiten",
    "policy_loss_forward",
    "step_advantages",
    "token_logprobs_backward",
    "token_logprobs_forward",
]

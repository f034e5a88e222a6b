"""The Triton path: each op as one launch, with the functions of torch_impl under the same names."""

from .advantages import group_advantages
from .logprobs import token_logprobs_backward, token_logprobs_forward
from .policy_loss import policy_loss_forward

__all__ = ["group_advantages", "policy_loss_forward", "token_logprobs_backward", "token_logprobs_forward"]

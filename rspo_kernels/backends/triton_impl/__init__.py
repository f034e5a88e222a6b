"""The Triton path: each op as one launch, with the functions of torch_impl under the same names."""

from .advantages import group_advantages
from .fused import logits_policy_loss, loss_rows_
from .linear_logprobs import fits_descriptors, linear_token_logprobs
from .logprobs import token_logprobs_backward, token_logprobs_forward
from .policy_loss import policy_loss_forward
from .scale import scale_
from .scans import discounted_returns, gae
from .steps import step_advantages
from .whiten import masked_whiten

__all__ = [
    "discounted_returns",
    "fits_descriptors",
    "gae",
    "group_advantages",
    "linear_token_logprobs",
    "logits_policy_loss",
    "loss_rows_",
    "masked_whiten",
    "policy_loss_forward",
    "scale_",
    "step_advantages",
    "token_logprobs_backward",
    "token_logprobs_forward",
]

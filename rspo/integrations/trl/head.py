"""What a causal LM predicts, read off inside its forward pass, where neither DDP nor FSDP misses it.

`model(..., read=function)` runs the body and gives function(hidden, head): sharded weights are whole then, and the
gradients of whatever the function returns go the way of any other forward pass. The logits never exist in full.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class OutputHead:
    """logits = softcap(logit_scale·(hidden·weightᵀ + bias)).

    weight: [V, H].  bias: [V] or None.  logit_scale, softcap: as in `rspo_kernels.linear_policy_loss`.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> OutputHead:
        """The model's own, in the dtype of the hidden states that it will be given."""
        head, config = model.get_output_embeddings(), model.config.get_text_config()
        weight, bias = _whole(head.weight), _whole(getattr(head, "bias", None))
        assert weight is not None
        scale = getattr(config, "logit_scale", None) or 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1 / config.logits_scaling
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), scale, softcap)

    def arguments(self) -> dict[str, Any]:
        """What the fused ops take besides hidden states, weight and targets."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for hidden [..., H]."""
        scores = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.logit_scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def _whole(parameter: Tensor | None) -> Tensor | None:
    """FSDP2 shows shards of the output head's weights also while it runs the model."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def make_readable(model: PreTrainedModel, in_float32: bool = False) -> None:
    """Let `model(..., read=function)` give function(hidden [B, L, H], OutputHead). Without `read` nothing changes.

    in_float32: read in float32 also where the body runs in another dtype.
    """
    forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def reading_forward(
        self: PreTrainedModel, *args: Any, read: Callable[[Tensor, OutputHead], Any] | None = None, **kwargs: Any
    ) -> Any:
        if read is None:
            return forward(*args, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        kind = hidden.device.type
        if in_float32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        return read(hidden, OutputHead.of(self, hidden.dtype))

    model.forward = types.MethodType(reading_forward, model)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError where a model's logits are not what `OutputHead` makes of its hidden states: on a few tokens, to
    the rounding of its dtype."""
    name = type(model).__name__
    if model.get_output_embeddings() is None or model.base_model is model:
        raise ValueError(f"{name} has no output head apart from its body; the fused policy loss needs one")
    was_training = model.training
    model.eval()
    try:
        tokens = torch.arange(8, device=model.device).unsqueeze(0)
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        expected = model(input_ids=tokens, use_cache=False).logits
        # The head may be float32 by choice while the body is not.
        head = OutputHead.of(model, model.get_output_embeddings().weight.dtype)
        made = head.logits(hidden.to(head.weight.dtype))
    finally:
        model.train(was_training)
    eps = torch.finfo(hidden.dtype).eps
    if not torch.allclose(made.float(), expected.float(), rtol=8 * eps, atol=8 * eps, equal_nan=True):
        error = float((made.float() - expected.float()).abs().max())
        raise ValueError(
            f"the logits of {name} must be logit_scale·(hidden·weightᵀ + bias), softcapped or not, for the fused "
            f"policy loss; on a few tokens they differ from that by {error:g}"
        )

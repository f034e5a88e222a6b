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

from rspo.models.heads import Head, body_of, find_head


@dataclass(frozen=True)
class WholeHead:
    """A model's output head as one forward pass sees it.

    weight: [V, H] and bias: [V] or None, whole, in the dtype of the hidden states.
    """

    weight: Tensor
    bias: Tensor | None
    head: Head

    @classmethod
    def of(cls, head: Head, dtype: torch.dtype) -> WholeHead:
        """Of the head's weights as they are now."""
        return cls(_whole(head.weight).to(dtype), None if head.bias is None else _whole(head.bias).to(dtype), head)

    def arguments(self) -> dict[str, Any]:
        """What the fused ops take besides hidden states, weight and targets."""
        return {"bias": self.bias, "logit_scale": self.head.logit_scale, "softcap": self.head.softcap}


Read = Callable[[Tensor, WholeHead], Any]


def _whole(parameter: Tensor) -> Tensor:
    """FSDP2 may show the shards of a head's weights also while it runs the model."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def head_of(model: PreTrainedModel) -> Head:
    """The head of a model that may be in the middle of training. Raises UnknownHeadError, a ValueError."""
    was_training = model.training
    model.eval()
    try:
        return find_head(model)
    finally:
        model.train(was_training)


def make_readable(model: PreTrainedModel, head: Head, in_float32: bool = False) -> None:
    """Let `model(..., read=function)` give function(hidden [B, L, H], head). Without `read` nothing changes.

    head: of this model or of one like it.
    in_float32: read in float32 also where the body runs in another dtype.
    """
    forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def reading_forward(self: PreTrainedModel, *args: Any, read: Read | None = None, **kwargs: Any) -> Any:
        if read is None:
            return forward(*args, **kwargs)
        hidden = body_of(self)(*args, use_cache=False, **kwargs).last_hidden_state
        kind = hidden.device.type
        if in_float32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(kind):
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        own = Head(self.get_output_embeddings(), head.softcap, head.logit_scale)
        return read(hidden, WholeHead.of(own, hidden.dtype))

    model.forward = types.MethodType(reading_forward, model)

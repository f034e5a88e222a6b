"""The output head of a causal LM: how its logits come from its last hidden states.

    logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap)

Most models have neither a scale nor a cap. Gemma caps, Cohere scales, Granite divides. Names in a model's configuration
suggest what it does; what it really does is found by a probe, so that an unknown kind of head is never taken for a
known one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

CAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")
"""What configurations call a cap."""
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""What configurations call a factor, or its inverse."""
PROBE_TOKENS = 8
PROBE_SIZES = (0.1, 1.0, 4.0)
"""Largest logits that the probe asks for, in units of the cap: a cap is hardly seen at the first and bites at the last.
Without a cap the unit is 50."""


class UnknownHeadError(ValueError):
    """A model whose logits cannot be told from its hidden states; the message says why."""


@dataclass(frozen=True)
class Head:
    """A linear layer, with a scale and a cap on what it gives.

    Its weights are looked up when they are used: a model that is sharded puts others in their place.
    """

    linear: nn.Linear
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def weight(self) -> Tensor:
        """[V, H]."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """[V], or None."""
        return self.linear.bias

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.linear.out_features

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of hidden states [..., H]."""
        logits = self.linear(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return cast(Tensor, logits)


def body_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head, also of one that peft has wrapped."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return cast(nn.Module, inner.base_model)


def find_head(model: PreTrainedModel) -> Head:
    """The head of a causal LM, tested with a few forward passes of 8 tokens.

    Raises UnknownHeadError where there is none, where it is more than a linear layer (an adapter, quantised weights),
    or where the logits are not those of any `Head`.
    """
    linear = model.get_output_embeddings()
    if linear is None:
        raise UnknownHeadError(f"{type(model).__name__} has no output embeddings")
    # An adapter that has learned nothing yet does not show in the probe.
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        raise UnknownHeadError(f"its output embeddings are a {type(linear).__name__}, not a plain linear layer")
    if body_of(model) is model:
        raise UnknownHeadError(f"{type(model).__name__} has no body apart from its head")
    for head in _candidates(model, linear):
        if _fits(model, head):
            return head
    raise UnknownHeadError(
        f"the logits of {type(model).__name__} are not those of its output embeddings, with or without a scale or cap"
        " that its configuration names"
    )


def _candidates(model: PreTrainedModel, linear: nn.Linear) -> Iterator[Head]:
    """Heads that the configuration allows: those that use what it names come first."""
    config = model.config.get_text_config()
    caps = [getattr(config, name, None) for name in CAPS]
    factors = [float(x) for x in (getattr(config, name, None) for name in SCALES) if x]
    scales = [scale for factor in factors for scale in (factor, 1 / factor)]
    for softcap, scale in product([*(float(cap) for cap in caps if cap), None], [*scales, 1.0]):
        yield Head(linear, softcap, scale)


@torch.inference_mode()
def _fits(model: PreTrainedModel, head: Head) -> bool:
    """Whether the model makes this head's logits: of its own hidden states, and of others so large that a cap bites."""
    body, weight = body_of(model), head.weight
    probe = torch.arange(PROBE_TOKENS, device=weight.device).unsqueeze(0) % head.vocab_size
    hidden = body(input_ids=probe, use_cache=False).last_hidden_state
    if hidden.dtype != weight.dtype or not _close(head, hidden, model(input_ids=probe, use_cache=False).logits):
        return False
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=generator).to(hidden)
    largest = head.linear(noise).float().abs().max() * head.logit_scale
    for size in PROBE_SIZES:
        chosen = noise * (size * (head.softcap or 50.0) / largest).to(noise.dtype)
        if not _close(head, chosen, _logits_of(model, body, probe, chosen)):
            return False
    return True


def _logits_of(model: PreTrainedModel, body: nn.Module, probe: Tensor, hidden: Tensor) -> Tensor:
    """What the model makes of the given last hidden states, [1, 8, V]."""

    def replaced(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        output.last_hidden_state = hidden
        return output

    handle = body.register_forward_hook(replaced)
    try:
        return cast(Tensor, model(input_ids=probe, use_cache=False).logits)
    finally:
        handle.remove()


def _close(head: Head, hidden: Tensor, logits: Tensor) -> bool:
    """Whether logits are the head's up to the rounding of the few steps that it takes in the model's dtype."""
    expected = head.logits(hidden)
    if expected.shape != logits.shape or not expected.isfinite().all():
        return False
    unit = torch.finfo(hidden.dtype).eps
    return torch.allclose(logits.float(), expected.float(), rtol=4 * unit, atol=unit * float(expected.abs().max()))

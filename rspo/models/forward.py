"""All that training computes of a policy, as the forward pass of one module.

Sharded weights (FSDP) are whole only while the forward pass of their module runs, and the output head's are needed
after the body's. Whatever reads predictions, a loss above all, therefore runs inside that forward pass.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rspo_kernels import (
    PolicyLossConfig,
    Segments,
    linear_policy_loss,
    linear_token_logprobs,
    policy_loss,
    token_logprobs,
)

from ..config import ConfigError
from ..data.batch import Batch
from .heads import Head, UnknownHeadError, body_of, find_head

LARGE_VOCABULARY = 8192

Read = TypeVar("Read")


@dataclass(frozen=True)
class Part:
    """Tokens whose loss is a sum over them divided by one number.

    mask: bool [N].  divisor: > 0.
    """

    mask: Tensor
    divisor: float


class Predictions(ABC):
    """What a policy says of a batch's N response tokens. Its two kinds give the same numbers, up to rounding.

    Args:
        batch: whose tokens.
        hidden: the last hidden states [N, H] that predict them; None where nothing needs them.
    """

    def __init__(self, batch: Batch, hidden: Tensor | None) -> None:
        self.batch = batch
        self.hidden = hidden

    @abstractmethod
    def logits(self) -> Tensor:
        """[N, V], with a graph where grad is enabled."""

    @abstractmethod
    def logprobs(self, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [N] each, with a graph where grad is enabled."""

    @abstractmethod
    def policy_loss(
        self, parts: dict[str, Part], segments: Segments, temperature: float, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """The losses of all parts added up (0-d, with a graph), and statistics of each, as `rspo_kernels.policy_loss`
        gives them. Parts have no token in common."""

    def _loss_inputs(self, segments: Segments) -> dict[str, Any]:
        """What any loss is given of the batch besides its advantages, mask and weights."""
        return {
            "old_logp": self.batch.old_logp,
            "behavior_logp": self.batch.behavior_logp,
            "ref_logp": self.batch.ref_logp,
            "segments": segments,
        }


class PredictionsByLogits(Predictions):
    """Predictions for which the logits are made in full.

    make_logits: gives them, when they are first asked for.
    """

    def __init__(self, batch: Batch, hidden: Tensor | None, make_logits: Callable[[], Tensor]) -> None:
        super().__init__(batch, hidden)
        self._make_logits = make_logits
        self._logits: Tensor | None = None

    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self._make_logits()
        return self._logits

    def logprobs(self, temperature: float) -> tuple[Tensor, Tensor]:
        scored = token_logprobs(self.logits(), self.batch.targets, temperature=temperature, with_entropy=True)
        return cast(tuple[Tensor, Tensor], scored)

    def policy_loss(
        self, parts: dict[str, Part], segments: Segments, temperature: float, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        logp, entropy = self.logprobs(temperature)
        losses: list[Tensor] = []
        stats: dict[str, dict[str, Tensor]] = {}
        for name, part in parts.items():
            loss, stats[name] = policy_loss(
                logp,
                self.batch.advantages,
                mask=part.mask,
                weights=self.batch.weights,
                normalizer=part.divisor,
                entropy=entropy if config.entropy_coef != 0 else entropy.detach(),  # else a statistic only
                config=config,
                **self._loss_inputs(segments),
            )
            losses.append(loss)
        return torch.stack(losses).sum(), stats


class FusedPredictions(Predictions):
    """Predictions straight from hidden states: the logits exist for a few tokens at a time, those of masked tokens
    never."""

    def __init__(self, batch: Batch, hidden: Tensor, head: Head) -> None:
        super().__init__(batch, hidden)
        self._head = head
        self._states = hidden
        self._transform: dict[str, Any] = {"bias": head.bias, "softcap": head.softcap, "logit_scale": head.logit_scale}

    def logits(self) -> Tensor:
        return self._head.logits(self._states)

    def logprobs(self, temperature: float) -> tuple[Tensor, Tensor]:
        scored = linear_token_logprobs(
            self._states,
            self._head.weight,
            self.batch.targets,
            temperature=temperature,
            with_entropy=True,
            **self._transform,
        )
        return cast(tuple[Tensor, Tensor], scored)

    def policy_loss(
        self, parts: dict[str, Part], segments: Segments, temperature: float, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        # One call for all parts: each would hold a float32 gradient of the head.
        masks = torch.stack([part.mask for part in parts.values()])
        dtype = torch.promote_types(self._states.dtype, torch.float32)
        weights = torch.stack([part.mask.to(dtype) / part.divisor for part in parts.values()]).sum(0)
        if self.batch.weights is not None:
            weights = weights * self.batch.weights
        loss, stats = linear_policy_loss(
            self._states,
            self._head.weight,
            self.batch.targets,
            self.batch.advantages,
            mask=masks.any(0),
            weights=weights,
            normalizer=1.0,
            temperature=temperature,
            # Metrics are over all tokens, whichever way the loss is computed. Tokens without an advantage cost a third
            # of the others for that.
            with_entropy=True,
            exact_stats=True,
            parts=masks,
            config=config,
            **self._transform,
            **self._loss_inputs(segments),
        )
        return loss, {name: {key: stats[key][i] for key in stats} for i, name in enumerate(parts)}


class PolicyModule(nn.Module):
    """A causal LM whose forward pass ends in whatever is to be read off its predictions.

    Args:
        model: the transformers model; its parameters are called `model....` here.
        packs: forward passes over a batch run without padding.
        fused: as `PolicyConfig.fused`. Raises ConfigError where it is "on" and cannot be.

    Attributes:
        head: what makes logits of hidden states; None where that is not known, and the model makes them itself.
        fused: log-probs and losses come from hidden states.
    """

    def __init__(self, model: PreTrainedModel, packs: bool, fused: str = "auto") -> None:
        super().__init__()
        self.model = model
        self.packs = packs
        self.head, self.fused = choose_head(model, fused)

    def forward(self, batch: Batch, read: Callable[[Predictions], Read], with_hidden: bool = False) -> Read:
        """read(predictions) of the batch's response tokens.

        Args:
            batch: on the model's device.
            read: returns tensors, or tuples and dicts of them, so that FSDP sees what gradients come back to.
            with_hidden: `predictions.hidden` is asked for.
        """
        return read(self._predictions(batch, with_hidden))

    def _predictions(self, batch: Batch, with_hidden: bool) -> Predictions:
        head = self.head
        if head is None:
            inputs, positions = _forward_inputs(batch, self.packs)
            output = self.model(**inputs, use_cache=False, output_hidden_states=with_hidden)
            last = output.hidden_states[-1].flatten(0, 1)[positions] if with_hidden else None
            return PredictionsByLogits(batch, last, lambda: output.logits.flatten(0, 1)[positions])
        hidden = run_body(body_of(self.model), batch, self.packs)
        if self.fused:
            return FusedPredictions(batch, hidden, head)
        return PredictionsByLogits(batch, hidden, lambda: head.logits(hidden))


def choose_head(model: PreTrainedModel, fused: str) -> tuple[Head | None, bool]:
    """A model's head, where it is understood, and whether losses come from hidden states.

    fused: "auto" is "on" from a vocabulary of `LARGE_VOCABULARY` on: logits of a small one cost little.

    Raises ConfigError for "on" and a head that is not understood; warns where "auto" would have been "on".
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    wanted = fused == "on" or (fused == "auto" and vocab_size >= LARGE_VOCABULARY)
    try:
        return find_head(model), wanted
    except UnknownHeadError as error:
        if fused == "on":
            raise ConfigError(f"policy.fused must be 'auto' or 'off' for this model: {error}") from error
        if wanted:
            warnings.warn(f"logits of all {vocab_size} words are made for every token: {error}", stacklevel=2)
        return None, False


def run_body(body: nn.Module, batch: Batch, packs: bool) -> Tensor:
    """A model's body over a batch: last hidden states [N, H] at the positions that predict the response tokens."""
    inputs, positions = _forward_inputs(batch, packs)
    hidden = body(**inputs, use_cache=False).last_hidden_state
    return cast(Tensor, hidden.flatten(0, 1).index_select(0, positions))


def _forward_inputs(batch: Batch, packs: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What a model is given of a batch, and the flat positions [N] of its output that predict the response tokens.

    Distinct rows run once: members of a group often are in the same situation and do the same (half the rows of a
    trained household agent). Packed, they stand end to end with positions that begin anew, which is how transformers
    knows that they must not see each other.
    """
    distinct, row_of = torch.unique(batch.input_ids, dim=0, return_inverse=True)
    rows, width = row_of[batch.token_row], distinct.shape[1]
    if not packs:
        return {"input_ids": distinct}, rows * width + batch.token_column
    lengths = batch.row_lengths.new_zeros(len(distinct)).scatter_reduce_(0, row_of, batch.row_lengths, "amax")
    columns = torch.arange(width, device=distinct.device).expand_as(distinct)
    real = columns < lengths[:, None]
    starts = torch.cumsum(lengths, 0) - lengths
    inputs = {"input_ids": distinct[real].unsqueeze(0), "position_ids": columns[real].unsqueeze(0)}
    return inputs, starts[rows] + batch.token_column

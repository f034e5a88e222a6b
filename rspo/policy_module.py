"""All that training computes of a policy, as the forward pass of one module.

Sharded weights (FSDP) are whole only while the forward pass of their module runs, and the output head's are needed
after the body's. Whatever reads predictions, a loss above all, therefore runs inside that forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rspo_kernels import PolicyLossConfig, Segments, policy_loss, token_logprobs

from .batch import Batch

Read = TypeVar("Read")


class Predictions:
    """What a policy says of a batch's N response tokens, by their logits.

    Args:
        batch: whose tokens.
        make_logits: gives the logits [N, V], when they are first asked for.
        hidden: the last hidden states [N, H] that they are made of, or None.
    """

    def __init__(self, batch: Batch, make_logits: Callable[[], Tensor], hidden: Tensor | None) -> None:
        self.batch = batch
        self.hidden = hidden
        self._make_logits = make_logits
        self._logits: Tensor | None = None
        self._scored: tuple[float, tuple[Tensor, Tensor]] | None = None

    def logits(self) -> Tensor:
        """[N, V], with a graph where grad is enabled."""
        if self._logits is None:
            self._logits = self._make_logits()
        return self._logits

    def logprobs(self, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, float32 [N] each, with a graph where grad is enabled."""
        scored = token_logprobs(self.logits(), self.batch.targets, temperature=temperature, with_entropy=True)
        return cast(tuple[Tensor, Tensor], scored)

    def policy_loss(
        self, mask: Tensor, normalizer: float, segments: Segments, temperature: float, config: PolicyLossConfig
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (0-d, with a graph) and statistics of the tokens in `mask`, bool [N], as `rspo_kernels.policy_loss`
        gives them."""
        if self._scored is None or self._scored[0] != temperature:  # once for all parts of a mixture
            self._scored = temperature, self.logprobs(temperature)
        logp, entropy = self._scored[1]
        return policy_loss(
            logp,
            self.batch.advantages,
            mask=mask,
            normalizer=normalizer,
            old_logp=self.batch.old_logp,
            behavior_logp=self.batch.behavior_logp,
            ref_logp=self.batch.ref_logp,
            entropy=entropy if config.entropy_coef != 0 else entropy.detach(),  # else a statistic only
            segments=segments,
            config=config,
        )


class PolicyModule(nn.Module):
    """A causal LM whose forward pass ends in whatever is to be read off its predictions.

    Args:
        model: the transformers model; its parameters are called `model....` here.
        packs: forward passes over a batch run without padding.
    """

    def __init__(self, model: PreTrainedModel, packs: bool) -> None:
        super().__init__()
        self.model = model
        self.packs = packs
        self.head_is_plain = _head_is_plain(model)

    def forward(self, batch: Batch, read: Callable[[Predictions], Read], with_hidden: bool = False) -> Read:
        """read(predictions) of the batch's response tokens.

        Args:
            batch: on the model's device.
            read: returns tensors, or tuples and dicts of them, so that FSDP sees what gradients come back to.
            with_hidden: `predictions.hidden` is asked for.
        """
        if self.head_is_plain:
            hidden = run_body(self.model.base_model, batch, self.packs)
            return read(Predictions(batch, lambda: self.model.get_output_embeddings()(hidden), hidden))
        inputs, positions = _forward_inputs(batch, self.packs)
        output = self.model(**inputs, use_cache=False, output_hidden_states=with_hidden)
        last = output.hidden_states[-1].flatten(0, 1)[positions] if with_hidden else None
        return read(Predictions(batch, lambda: output.logits.flatten(0, 1)[positions], last))


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


@torch.inference_mode()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Whether logits are just the output embeddings of the last hidden state: some models scale or cap them.

    Bit for bit, because a cap changes small logits by little; a wrong "no" only costs time.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    probe = torch.arange(8, device=model.device).unsqueeze(0)
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    expected = model(input_ids=probe, use_cache=False).logits
    return torch.equal(head(hidden).float(), expected.float())

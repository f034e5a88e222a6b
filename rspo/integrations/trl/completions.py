"""Padded completions, as TRL makes them, and those of agent B on their way into the replay buffer and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rspo.data.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class CompletionBatch:
    """B prompts of up to P tokens, padded on the left, and their completions of up to C tokens, padded on the right.

    prompt_ids, prompt_mask: int64 [B, P].  completion_ids, completion_mask: int64 [B, C], what the model sees.
    loss_mask: bool [B, C], what it is trained on: its own tokens, not those of tools.
    advantages: float [B, C].
    old_logp, behavior_logp, ref_logp: float [B, C] or None, as in `rspo_kernels.policy_loss`.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    old_logp: Tensor | None = None
    behavior_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    @classmethod
    def from_inputs(cls, inputs: dict[str, Any]) -> CompletionBatch:
        """Of what TRL's `_generate_and_score_completions` gives."""
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        if "importance_sampling_ratio" in inputs:
            # In the advantage and not in the token's weight: the KL term is not corrected.
            advantages = advantages * inputs["importance_sampling_ratio"]
        return cls(
            inputs["prompt_ids"],
            inputs["prompt_mask"],
            ids,
            mask,
            (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).bool(),
            advantages.expand(ids.shape),
            old_logp=inputs.get("old_per_token_logps"),
            ref_logp=inputs.get("ref_per_token_logps"),
        )

    @classmethod
    def from_collected(
        cls, completions: Sequence[CollectedCompletion], pad_id: int, device: torch.device
    ) -> CompletionBatch:
        """Of agent B's completions, at least one; the old log-probs are still to be made."""
        prompts = [completion.turns[0].prompt_ids for completion in completions]
        responses = [completion.turns[0].response_ids for completion in completions]
        ref_logps = [completion.ref_logp for completion in completions if completion.ref_logp is not None]
        columns = {
            "prompt_ids": _padded(prompts, pad_id, left=True),
            "prompt_mask": _padded([np.ones_like(ids) for ids in prompts], 0, left=True),
            "completion_ids": _padded(responses, pad_id),
            "completion_mask": _padded([np.ones_like(ids) for ids in responses], 0),
            "loss_mask": _padded([completion.loss_mask for completion in completions], False),
            "advantages": _padded([completion.token_advantages for completion in completions], 0.0),
            "behavior_logp": _padded([completion.turns[0].behavior_logp for completion in completions], 0.0),
        }
        if ref_logps:
            columns["ref_logp"] = _padded(ref_logps, 0.0)
        return cls(**{name: column.to(device) for name, column in columns.items()})

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def input_ids(self) -> Tensor:
        """int64 [B, P + C]."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """int64 [B, P + C]."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)


def side_by_side(batches: Sequence[CompletionBatch], pad_id: int) -> dict[str, Tensor]:
    """The model's inputs for the rows of all batches one below the other, int64 [ΣB, max P + max C]; completions all
    begin at the same column."""
    left = max(batch.prompt_ids.shape[1] for batch in batches)
    right = max(batch.completion_ids.shape[1] for batch in batches)

    def rows(batch: CompletionBatch, values: Tensor, fill: int) -> Tensor:
        return pad(values, (left - batch.prompt_ids.shape[1], right - batch.completion_ids.shape[1]), value=fill)

    return {
        "input_ids": torch.cat([rows(batch, batch.input_ids, pad_id) for batch in batches]),
        "attention_mask": torch.cat([rows(batch, batch.attention_mask, 0) for batch in batches]),
    }


@dataclass(slots=True)
class CollectedCompletion(Trajectory):
    """A completion of agent B, tool calls and all, as a trajectory of one turn.

    loss_mask: bool [T], tokens that the model wrote itself.
    ref_logp: float32 [T], log-probs under the reference, where the loss asks for them.
    """

    loss_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    ref_logp: np.ndarray | None = None

    @property
    def token_advantages(self) -> np.ndarray:
        """float32 [T]."""
        assert self.advantages is not None
        return np.full(len(self.turns[0].response_ids), self.advantages[0], np.float32)


def collected(
    batch: CompletionBatch, behavior_logp: Tensor, rewards: Sequence[float], group_size: int, first: int
) -> list[CollectedCompletion]:
    """The rows of a batch as entries of a replay buffer.

    Args:
        batch: B rows, consecutive ones of a round whose groups are `group_size` consecutive rows.
        behavior_logp: float [B, C], log-probs under the policy that wrote them.
        rewards: [B] outcome rewards; above 0 counts as success.
        first: position in the round of the first row.
    """
    entries = []
    lengths = batch.completion_mask.sum(1).tolist()
    for row, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        turn = Turn(
            prompt_ids=batch.prompt_ids[row][batch.prompt_mask[row].bool()].cpu().numpy(),
            response_ids=batch.completion_ids[row, :length].cpu().numpy(),
            behavior_logp=behavior_logp[row, :length].float().cpu().numpy(),
            reward=reward,
            dense_reward=0.0,
            anchor="",
            action="",
            is_action_valid=True,
        )
        group, index = divmod(first + row, group_size)
        entry = CollectedCompletion("", group, index, [turn], won=reward > 0, task_score=reward)
        entry.rewards = np.array([reward], np.float32)
        entry.advantages = batch.advantages[row, :1].float().cpu().numpy()
        entry.loss_mask = batch.loss_mask[row, :length].cpu().numpy()
        entry.ref_logp = None if batch.ref_logp is None else batch.ref_logp[row, :length].float().cpu().numpy()
        entries.append(entry)
    return entries


def _padded(rows: Sequence[Any], fill: float | bool, left: bool = False) -> Tensor:
    """Rows of different lengths as one tensor."""
    width = max(len(row) for row in rows)
    sides = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
    return torch.stack([pad(torch.from_numpy(row), side, value=fill) for row, side in zip(rows, sides, strict=True)])

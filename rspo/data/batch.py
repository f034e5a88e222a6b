"""Trajectories as the tensors that a model is trained on: rows of tokens, of which the responses carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rspo_kernels import Segments

from .trajectory import REPLAY, Trajectory, Turn


@dataclass(frozen=True)
class Batch:
    """R rows, padded on the right to L; T turns, the responses of the rows in order; N response tokens in all.

    In the per_turn layout a row is a turn's prompt and response, in the conversation layout a whole trajectory. Right
    padding needs no attention mask under causal attention, and positions count from 0 in every row. Tokens are in the
    order of the rows; response token n is predicted at `input_ids[token_row[n], token_column[n]]`.

    Of rows: input_ids int64 [R, L]; row_lengths int64 [R].
    Of turns, int64 [T]: turn_row; turn_lengths, their response tokens; turn_trajectory, an index of the trajectories
        the batch was made of; turn_index within that trajectory. bool [T]: turn_valid, the response was well formed
        and its action accepted; turn_well_formed, the former alone.
    Of tokens [N]: token_row, token_column, targets int64; behavior_logp, old_logp, advantages, rewards (a turn's at
        its last token) float32; is_replay bool; and where asked for, else None: ref_logp, values (the critic's before
        the update), returns (what they should be), bootstrap (at the last token of a truncated trajectory the
        critic's value of the state it was cut off in, elsewhere 0), weights (factors of the tokens' losses), all
        float32.
    """

    input_ids: Tensor
    row_lengths: Tensor
    turn_row: Tensor
    turn_lengths: Tensor
    turn_trajectory: Tensor
    turn_index: Tensor
    turn_valid: Tensor
    turn_well_formed: Tensor
    token_row: Tensor
    token_column: Tensor
    targets: Tensor
    behavior_logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    rewards: Tensor
    is_replay: Tensor
    ref_logp: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    bootstrap: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], layout: str = "per_turn") -> Batch:
        """All turns of the trajectories, in order. `old_logp` starts as `behavior_logp`; rewards and advantages that
        were not set are 0.

        Raises ValueError for no turns, for a response without tokens or with another number of log-probs, and in the
        conversation layout where a prompt does not continue the turn before it.
        """
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        if not turns:
            raise ValueError("a batch needs at least one turn")
        _check_responses(trajectories)
        counts = [len(trajectory) for trajectory in trajectories]
        prompts = np.array([len(turn.prompt_ids) for turn in turns])
        responses = np.array([len(turn.response_ids) for turn in turns])
        ends = prompts + responses
        turn_index = np.concatenate([np.arange(count) for count in counts])
        if layout == "conversation":
            _check_conversations(trajectories)
            turn_row = np.repeat(np.arange(len(counts)), counts)
            last = np.append(np.flatnonzero(turn_index == 0)[1:] - 1, len(turns) - 1)
        else:
            turn_row = last = np.arange(len(turns))

        lengths = ends[last]
        input_ids = np.zeros((len(lengths), int(lengths.max())), dtype=np.int64)
        flat = np.concatenate([part for i in last for part in (turns[i].prompt_ids, turns[i].response_ids)])
        # A boolean mask enumerates cells row by row, which is the order of `flat`.
        input_ids[np.arange(input_ids.shape[1]) < lengths[:, None]] = flat

        token_turn = np.repeat(np.arange(len(turns)), responses)
        first_token = np.cumsum(responses) - responses
        token_row = turn_row[token_turn]
        token_column = np.arange(len(token_turn)) - first_token[token_turn] + prompts[token_turn] - 1
        behavior_logp = np.concatenate([turn.behavior_logp for turn in turns]).astype(np.float32)
        rewards = np.zeros(len(token_turn), dtype=np.float32)
        rewards[first_token + responses - 1] = _of_turns(trajectories, "rewards")
        replay = np.repeat([trajectory.source == REPLAY for trajectory in trajectories], counts)
        arrays = {
            "input_ids": input_ids,
            "row_lengths": lengths,
            "turn_row": turn_row,
            "turn_lengths": responses,
            "turn_trajectory": np.repeat(np.arange(len(trajectories)), counts),
            "turn_index": turn_index,
            "turn_valid": np.array([turn.is_action_valid for turn in turns]),
            "turn_well_formed": np.array([turn.is_well_formed for turn in turns]),
            "token_row": token_row,
            "token_column": token_column,
            "targets": input_ids[token_row, token_column + 1],
            "behavior_logp": behavior_logp,
            "old_logp": behavior_logp.copy(),
            "advantages": _of_turns(trajectories, "advantages")[token_turn],
            "rewards": rewards,
            "is_replay": replay[token_turn],
        }
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    @classmethod
    def from_prompts(cls, prompts: Sequence[np.ndarray]) -> Batch:
        """One row and one token for each prompt (int64 [P]): the one to come, whatever it is."""
        token, logp = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        turns = [Turn(prompt, token, logp, 0.0, 0.0, "", "", True) for prompt in prompts]
        return cls.from_trajectories([Trajectory(task="", group=0, index=0, turns=turns)])

    @property
    def num_rows(self) -> int:
        """R."""
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.targets.shape[0]

    @property
    def token_turn(self) -> Tensor:
        """Turn of each token, int64 [N]."""
        turns = torch.arange(len(self.turn_lengths), device=self.targets.device)
        return torch.repeat_interleave(turns, self.turn_lengths, output_size=self.num_tokens)

    def last_tokens(self, trajectories: Sequence[int]) -> Tensor:
        """The last token of each of these trajectories, int64."""
        ends = torch.cumsum(self.turn_lengths, 0) - 1
        turns = torch.arange(len(ends), device=ends.device)
        last = ends.new_zeros(int(self.turn_trajectory.max()) + 1)
        last.scatter_reduce_(0, self.turn_trajectory, turns, "amax")
        return ends[last[list(trajectories)]]

    def select(self, rows: Tensor) -> Batch:
        """The given rows (int64 [R'], in that order), with padding trimmed to the longest of them."""
        row, turns = _ranges(torch.bincount(self.turn_row, minlength=self.num_rows), rows)
        _, tokens = _ranges(self.turn_lengths, turns)
        width = int(self.row_lengths[rows].max())
        chosen: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                chosen[item.name] = value[_index(item.name, rows, turns, tokens)]
        chosen["input_ids"] = chosen["input_ids"][:, :width]
        chosen["turn_row"] = row
        chosen["token_row"] = torch.repeat_interleave(row, chosen["turn_lengths"], output_size=len(tokens))
        return Batch(**chosen)

    def micro_batches(self, max_tokens: int, packed: bool = False) -> list[Tensor]:
        """Row indices in pieces of at most `max_tokens` tokens (or one row), like lengths together; padding counts
        unless `packed`.

        Within a piece the rows keep their order, and so do their tokens.
        """
        return cut(self.row_lengths, max_tokens, packed)

    def segments(self) -> Segments:
        """Turns, and rows as sequences: in the per_turn layout each turn is a sequence of its own, as in verl-agent."""
        return Segments.from_lengths(self.turn_lengths, turn_sequence=self.turn_row)

    def trajectory_segments(self) -> Segments:
        """Turns, and trajectories as sequences, in either layout; of a whole batch, where all of them are there."""
        return Segments.from_lengths(self.turn_lengths, turn_sequence=self.turn_trajectory)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Batch(**{name: value.to(device) for name, value in values.items() if value is not None})


def cut(row_lengths: Tensor, max_tokens: int, packed: bool = False) -> list[Tensor]:
    """Indices of rows of the given lengths (int64 [R]) in pieces, as by `Batch.micro_batches`; none of no rows."""
    sorted_lengths, order = torch.sort(row_lengths, stable=True)
    lengths = sorted_lengths.tolist()
    pieces: list[Tensor] = []
    start, held = 0, lengths[0] if lengths else 0
    for end in range(1, len(lengths) + 1):
        if end < len(lengths):
            grown = held + lengths[end] if packed else (end + 1 - start) * lengths[end]
        if end == len(lengths) or grown > max_tokens:
            pieces.append(order[start:end].sort().values)
            start, held = end, lengths[end] if end < len(lengths) else 0
        else:
            held = grown
    return pieces


def _index(name: str, rows: Tensor, turns: Tensor, tokens: Tensor) -> Tensor:
    """What a field is selected by."""
    if name in ("input_ids", "row_lengths"):
        return rows
    return turns if name.startswith("turn_") else tokens


def _ranges(counts: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of things that stand in runs of `counts`, those of the chosen runs: new run of each, and old index, int64."""
    sizes = counts[chosen]
    run = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), sizes)
    within = torch.arange(len(run), device=chosen.device) - (torch.cumsum(sizes, 0) - sizes)[run]
    return run, (torch.cumsum(counts, 0) - counts)[chosen][run] + within


def _of_turns(trajectories: Sequence[Trajectory], name: str) -> np.ndarray:
    """A field of all turns in order, float32 [T]; 0 where it was not set."""
    parts = []
    for trajectory in trajectories:
        values = getattr(trajectory, name)
        parts.append(np.zeros(len(trajectory)) if values is None else values)
    return np.concatenate(parts).astype(np.float32)


def _check_responses(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            tokens, logp = len(turn.response_ids), len(turn.behavior_logp)
            if tokens == 0 or tokens != logp:
                raise ValueError(
                    f"the response of turn {number} of {trajectory} must have at least one token and a log-prob for"
                    f" each, got {tokens} tokens and {logp} log-probs"
                )


def _check_conversations(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        for number, (before, turn) in enumerate(zip(trajectory.turns, trajectory.turns[1:], strict=False), start=1):
            said = np.concatenate([before.prompt_ids, before.response_ids])
            if not np.array_equal(turn.prompt_ids[: len(said)], said):
                raise ValueError(
                    f"the prompt of turn {number} of {trajectory} does not continue the turn before it: it was not"
                    " sampled in the conversation layout"
                )

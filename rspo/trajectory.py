"""What a rollout leaves behind: turns, trajectories, and the batch of rows that a model is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rspo_kernels import Segments

ON_POLICY = "on_policy"
REPLAY = "replay"


@dataclass(slots=True)
class Turn:
    """One prompt and the model's answer to it; only the answer's tokens carry loss.

    prompt_ids: int64 [P].
    response_ids: int64 [T], the end-of-sequence token included where the model wrote it.
    behavior_logp: float32 [T], log-probabilities of the response under the policy that wrote it, at the rollout
        temperature and over the whole vocabulary.
    reward, dense_reward: the environment's outcome and process reward of this step.
    anchor: the raw observation that the turn began with; states are the same when their anchors are.
    action: the projected action.
    is_action_valid: well formed and accepted by the environment.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    behavior_logp: np.ndarray
    reward: float
    dense_reward: float
    anchor: str
    action: str
    is_action_valid: bool


@dataclass(slots=True)
class Trajectory:
    """One episode.

    task: the goal in words.  group: the task's index in its rollout; members share it.  index: member of the group.
    truncated: ended by the turn limit, so that its last state is not terminal.
    source: "on_policy" or "replay".
    rewards: float32 [turns], the rewards that are trained on, set by `rspo.rewards.relabel`.
    advantages: float32 [turns], set by an estimator.
    """

    task: str
    group: int
    index: int
    turns: list[Turn] = field(default_factory=list)
    won: bool = False
    task_score: float = 0.0
    truncated: bool = False
    source: str = ON_POLICY
    rewards: np.ndarray | None = None
    advantages: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.turns)

    def __str__(self) -> str:
        return f"trajectory {self.index} of group {self.group} ({self.source}, task {self.task!r})"

    @property
    def outcome(self) -> float:
        """Total outcome reward."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def dense_return(self) -> float:
        """Total process reward of the environment."""
        return float(sum(turn.dense_reward for turn in self.turns))

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return sum(len(turn.response_ids) for turn in self.turns)


@dataclass(frozen=True)
class Batch:
    """Rows (turns) of trajectories as tensors: R rows, padded on the right to L, with N response tokens in all.

    Right padding needs no attention mask under causal attention, and positions count from 0 in every row. Tokens are
    packed in the order of the rows; response token n is predicted at `input_ids[token_row[n], token_column[n]]`.

    input_ids int64 [R, L]; row_lengths, row_trajectory, row_turn int64 [R]; response_lengths int64 [R];
    token_row, token_column, targets int64 [N]; behavior_logp, old_logp, advantages float32 [N]; is_replay bool [N];
    ref_logp float32 [N], or None where no reference is asked for.
    """

    input_ids: Tensor
    row_lengths: Tensor
    response_lengths: Tensor
    row_trajectory: Tensor
    row_turn: Tensor
    token_row: Tensor
    token_column: Tensor
    targets: Tensor
    behavior_logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    is_replay: Tensor
    ref_logp: Tensor | None = None

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Batch:
        """All turns of the trajectories, in order. `old_logp` starts as `behavior_logp`; advantages default to 0."""
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        if not turns:
            raise ValueError("a batch needs at least one turn")
        prompts = np.array([len(turn.prompt_ids) for turn in turns])
        responses = np.array([len(turn.response_ids) for turn in turns])
        lengths = prompts + responses

        input_ids = np.zeros((len(turns), int(lengths.max())), dtype=np.int64)
        flat = np.concatenate([part for turn in turns for part in (turn.prompt_ids, turn.response_ids)])
        # A boolean mask enumerates cells row by row, which is the order of `flat`.
        input_ids[np.arange(input_ids.shape[1]) < lengths[:, None]] = flat

        token_row = np.repeat(np.arange(len(turns)), responses)
        first_token = np.cumsum(responses) - responses
        token_column = np.arange(len(token_row)) - first_token[token_row] + prompts[token_row] - 1
        behavior_logp = np.concatenate([turn.behavior_logp for turn in turns]).astype(np.float32)

        turn_counts = [len(trajectory) for trajectory in trajectories]
        advantages = [_advantages(trajectory) for trajectory in trajectories]
        replay = np.repeat([trajectory.source == REPLAY for trajectory in trajectories], turn_counts)
        arrays = {
            "input_ids": input_ids,
            "row_lengths": lengths,
            "response_lengths": responses,
            "row_trajectory": np.repeat(np.arange(len(trajectories)), turn_counts),
            "row_turn": np.concatenate([np.arange(count) for count in turn_counts]),
            "token_row": token_row,
            "token_column": token_column,
            "targets": input_ids[token_row, token_column + 1],
            "behavior_logp": behavior_logp,
            "old_logp": behavior_logp.copy(),
            "advantages": np.concatenate(advantages).astype(np.float32)[token_row],
            "is_replay": replay[token_row],
        }
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    @property
    def num_rows(self) -> int:
        """R."""
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.targets.shape[0]

    def select(self, rows: Tensor) -> Batch:
        """The given rows (int64 [R'], in that order), with padding trimmed to the longest of them."""
        counts = self.response_lengths[rows]
        ends = torch.cumsum(self.response_lengths, 0)
        new_row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        within = torch.arange(len(new_row), device=rows.device) - (torch.cumsum(counts, 0) - counts)[new_row]
        tokens = (ends - self.response_lengths)[rows][new_row] + within

        width = int(self.row_lengths[rows].max())
        chosen: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None:
                chosen[item.name] = value[rows if item.name in _ROW_FIELDS else tokens]
        chosen["input_ids"] = chosen["input_ids"][:, :width]
        chosen["token_row"] = new_row
        return Batch(**chosen)

    def micro_batches(self, max_tokens: int) -> list[Tensor]:
        """Row indices in pieces of at most `max_tokens` padded tokens (or one row), like lengths together.

        Within a piece the rows keep their order, and so do their tokens.
        """
        sorted_lengths, order = torch.sort(self.row_lengths, stable=True)
        lengths = sorted_lengths.tolist()
        pieces, start = [], 0
        for end in range(1, len(lengths) + 1):
            if end == len(lengths) or (end + 1 - start) * lengths[end] > max_tokens:
                pieces.append(order[start:end].sort().values)
                start = end
        return pieces

    def segments(self) -> Segments:
        """Each row is a turn and a sequence of its own, as in verl-agent."""
        return Segments.from_lengths(self.response_lengths)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return Batch(**{name: value.to(device) for name, value in values.items() if value is not None})


_ROW_FIELDS = frozenset({"input_ids", "row_lengths", "response_lengths", "row_trajectory", "row_turn"})


def _advantages(trajectory: Trajectory) -> np.ndarray:
    if trajectory.advantages is None:
        return np.zeros(len(trajectory), dtype=np.float32)
    return trajectory.advantages


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Plain values only; float32 numbers survive the way through JSON exactly."""
    values = {item.name: getattr(trajectory, item.name) for item in fields(trajectory)}
    values["turns"] = [
        {item.name: _listed(getattr(turn, item.name)) for item in fields(turn)} for turn in trajectory.turns
    ]
    return {name: _listed(value) for name, value in values.items()}


def trajectory_from_json(values: dict[str, Any]) -> Trajectory:
    """The inverse of `trajectory_to_json`."""
    values = dict(values)
    values["turns"] = [
        Turn(
            **{
                **turn,
                "prompt_ids": np.array(turn["prompt_ids"], dtype=np.int64),
                "response_ids": np.array(turn["response_ids"], dtype=np.int64),
                "behavior_logp": np.array(turn["behavior_logp"], dtype=np.float32),
            }
        )
        for turn in values["turns"]
    ]
    for name in ("rewards", "advantages"):
        if values[name] is not None:
            values[name] = np.array(values[name], dtype=np.float32)
    return Trajectory(**values)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value

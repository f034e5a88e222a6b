"""What a rollout leaves behind: turns and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..envs.base import WorkerError

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
    message: what a conversation says to the model at this turn: the task's opening at the first, then the reply to the
        turn before. Recorded in either layout, so that any model can read the episode as a conversation.
    response: the response's text, without special tokens.
    engine_logp: float32 [T], log-probs of the response as an engine that is not the training model said them; None
        where there is no such engine, or it does not know.
    is_well_formed: the response had the form that the environment asks for; files of earlier versions do not say.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    behavior_logp: np.ndarray
    reward: float
    dense_reward: float
    anchor: str
    action: str
    is_action_valid: bool
    message: str | None = None
    response: str | None = None
    engine_logp: np.ndarray | None = None
    is_well_formed: bool = True


@dataclass(slots=True)
class Trajectory:
    """One episode.

    task: the goal in words.  group: the task's index in its rollout; members share it.  index: member of the group.
    truncated: ended by the turn limit, so that its last state is not terminal, or cut off by a lost worker.
    lost: cut off because its environment's worker was lost (`rspo.envs.workers`); see `intact`.
    source: "on_policy" or "replay".
    task_type: the kind of task, where the environment has kinds; "" otherwise.
    final_prompt_ids: int64 [P], what the model would have read next, of a truncated trajectory that was not lost; else
        None.
    rewards: float32 [turns], the rewards that are trained on, set by `rspo.algorithm.rewards.relabel`.
    advantages: float32 [turns], set by an estimator.
    """

    task: str
    group: int
    index: int
    turns: list[Turn] = field(default_factory=list)
    won: bool = False
    task_score: float = 0.0
    truncated: bool = False
    lost: bool = False
    source: str = ON_POLICY
    task_type: str = ""
    final_prompt_ids: np.ndarray | None = None
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


def intact(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that were played to their own end. A lost worker says nothing about the agent: counted as a failure, its
    episodes would teach against what they did. Their groups go on with the other members.

    That is unbiased where losses have nothing to do with what the agent does. Where an action makes the environment
    crash, or longer episodes are lost more often, what remains is the sample without those.

    Raises WorkerError where nothing remains.
    """
    kept = [trajectory for trajectory in trajectories if not trajectory.lost]
    if not kept:
        raise WorkerError(f"all {len(trajectories)} episodes of a batch were lost with their environments' workers")
    return kept


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Plain values only; float32 numbers survive the way through JSON exactly."""
    values = {item.name: getattr(trajectory, item.name) for item in fields(trajectory)}
    values["turns"] = [
        {item.name: _listed(getattr(turn, item.name)) for item in fields(turn)} for turn in trajectory.turns
    ]
    for turn in values["turns"]:
        if turn["engine_logp"] is None:  # as in nearly all files
            del turn["engine_logp"]
    return {name: _listed(value) for name, value in values.items()}


def trajectory_from_json(values: dict[str, Any]) -> Trajectory:
    """The inverse of `trajectory_to_json`. Turns that were written without their texts have None for them."""
    values = dict(values)
    dtypes = {"prompt_ids": np.int64, "response_ids": np.int64, "behavior_logp": np.float32, "engine_logp": np.float32}
    values["turns"] = [
        Turn(**{**turn, **{name: np.array(turn[name], dtype=dtype) for name, dtype in dtypes.items() if name in turn}})
        for turn in values["turns"]
    ]
    for turn in values["turns"]:
        turn.anchor = _hashable(turn.anchor)
    for name, dtype in (("rewards", np.float32), ("advantages", np.float32), ("final_prompt_ids", np.int64)):
        if values[name] is not None:
            values[name] = np.array(values[name], dtype=dtype)
    return Trajectory(**values)


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_listed(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _hashable(anchor: Any) -> Any:
    """An anchor that was a tuple as one again."""
    return tuple(map(_hashable, anchor)) if isinstance(anchor, list) else anchor

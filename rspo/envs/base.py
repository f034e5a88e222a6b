"""The environment contract: Gymnasium's habits, batched and textual.

An environment holds a batch of independent episodes. `reset` starts one episode per (task, seed)
pair and `step` advances all of them by one textual action each. Episodes that have ended stay in
the batch: they ignore their action, give reward 0 and stay ended until the next `reset`.

An environment also owns its two ends of the conversation, because they belong together:
`render_prompt` makes the text the model reads, `project` makes an action of the text it wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Info = dict[str, Any]
StepResult = tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[Info]]


class WorkerError(RuntimeError):
    """Environments cannot go on in worker processes; the message holds a worker's traceback where there is one."""


class EnvironmentValueError(WorkerError, ValueError):
    """An environment returned something that is not what the contract says (`rspo.envs.returned`)."""


@dataclass(frozen=True)
class PromptContext:
    """What one agent may see at one turn.

    task: the goal in words.
    history: the last (observation, projected action) pairs, oldest first.
    observation: the current observation.
    admissible_actions: what the environment would accept now; empty where it does not say.
    turn: number of turns taken so far.
    """

    task: str
    history: tuple[tuple[str, str], ...]
    observation: str
    admissible_actions: tuple[str, ...]
    turn: int


class BatchedEnv(ABC):
    """A batch of textual episodes.

    Infos of `reset` and `step` carry, for each episode:
        task: str, the goal in words.
        anchor: str, the raw observation; states are the same when their anchors are.
        admissible_actions: list[str].
        is_action_valid: bool (True after reset).
        won: bool.
        task_score: float, the environment's own score of the episode so far.
        dense_reward: float, a step-level process reward, where `has_dense_reward`.
        lost_worker: bool, True from when the worker process of an unfinished episode was lost (`rspo.envs.workers`).
        task_type: str, the kind of task, where the environment has kinds (success is then also reported by kind).

    The outcome reward of `step` is 0 until the last turn. `terminated` is the environment's own
    end, `truncated` the turn limit (or a lost worker); a truncated state is not terminal.
    """

    max_turns: int
    episodes_at_once: int | None = None
    """Episodes of different tasks that a machine should hold at once, where each costs much; None: any number."""
    has_dense_reward: bool = False
    has_snapshots: bool = False

    @property
    def skipped_tasks(self) -> int:
        """Tasks that were met so far and passed over because their files are broken."""
        return 0

    @abstractmethod
    def tasks(self, split: str = "train") -> Sequence[Any]:
        """All tasks of a split ("train" or "eval"); every element can be given to `reset`."""

    @abstractmethod
    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        """Start len(tasks) episodes. Members of a group share task and seed; the same (task, seed) is the same
        episode whatever else is in the batch."""

    @abstractmethod
    def step(self, actions: Sequence[str]) -> StepResult:
        """Advance every episode: observations, rewards [n] float32, terminated [n] bool, truncated [n] bool, infos."""

    @abstractmethod
    def render_prompt(self, context: PromptContext) -> str:
        """The text that the model reads at one turn."""

    def render_opening(self, context: PromptContext) -> str:
        """The text that opens a conversation; by default the first turn's prompt."""
        return self.render_prompt(context)

    def render_reply(self, context: PromptContext) -> str:
        """The text that answers an action in a conversation; by default the observation."""
        return context.observation

    def vocabulary(self) -> Sequence[str] | None:
        """All words of prompts and actions, where they are made of words with white space between them and are few
        enough for a small model from scratch; None where not."""
        return None

    @abstractmethod
    def project(self, response: str) -> tuple[str, bool]:
        """The action in a model's response, and whether the response was well formed."""

    def snapshot(self) -> Any:
        """The state of all episodes, to be given to `restore` (where `has_snapshots`)."""
        raise RuntimeError(f"{type(self).__name__} cannot take snapshots (has_snapshots is False)")

    def restore(self, state: Any) -> tuple[list[str], list[Info]]:
        """Go back to a snapshot; gives the observations and infos of that moment."""
        raise RuntimeError(f"{type(self).__name__} cannot restore snapshots (has_snapshots is False)")

    def close(self) -> None:  # noqa: B027 - most environments hold nothing to release
        """Release workers and files."""

"""Environments made of one object per episode: write an `Episode`, and `EpisodeEnv` makes a batch of them.

The batch keeps the contract of `BatchedEnv`: turn limit, outcome reward at the end, infos, episodes that have ended,
prompts and projection. An episode only has to know its own world.
"""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .arguments import check_actions, check_settings, check_starts
from .base import BatchedEnv, Info, PromptContext, StepResult
from .losses import LossLog, place_of
from .returned import check_episode
from .verl_agent import VERL_AGENT, VerlAgentStyle
from .wording import PROMPT_STYLES, chat_prompt, chat_reply, project_tags, tagged

logger = logging.getLogger(__name__)


class Episode(ABC):
    """One episode: what can be seen of it now, and how it goes on.

    task: the goal in words.  task_type: the kind of task, "" where there are no kinds.
    observation: what the last action (or the start) showed.
    anchor: what tells states apart; the observation where it is None.
    admissible_actions: what would be accepted now; empty where that is not known.
    won, ended: success, and whether the environment itself has come to an end (won or not); with success it has.
    score: the environment's own score so far.
    dense_reward: process reward of the last action.
    """

    task: str
    task_type: str = ""
    observation: str
    anchor: str | None = None
    admissible_actions: Sequence[str] = ()
    won: bool = False
    ended: bool = False
    score: float = 0.0
    dense_reward: float = 0.0

    @abstractmethod
    def act(self, action: str) -> bool:
        """Take an action and update all of the above. False where the action was not a valid one."""

    def copy(self) -> Episode:
        """An episode in the same state that goes on independently (for snapshots)."""
        return deepcopy(self)

    def close(self) -> None:  # noqa: B027 - most episodes hold nothing to release
        """Release what the episode holds; it is not used any more."""


class ExpertEpisode(Episode):
    """An episode with a scripted expert."""

    @abstractmethod
    def expert_action(self) -> str:
        """The expert's next action. The episode has not ended."""


@dataclass
class _Place:
    """An episode in its batch, its number of turns, and what became of it."""

    episode: Episode
    turns: int = 0
    valid: Any = True
    truncated: bool = False
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.episode.ended or self.truncated


@dataclass(frozen=True)
class EpisodesSnapshot:
    """State of all episodes of an EpisodeEnv."""

    places: tuple[_Place, ...]


class EpisodeEnv(BatchedEnv):
    """A batch of `Episode`s; a subclass says what its tasks are and starts episodes on them.

    max_turns: actions allowed.
    outcome_scale: reward of the last turn of a won episode (10 in the paper's code base), 0 for any other turn.
    prompt_style: "chat", English for a pre-trained model, which thinks and then answers inside tags; or "compact",
        the bare facts for a small model that was trained on them, whose response is the action and nothing else; or
        "verl-agent", where the environment has that style (`rspo.envs.verl_agent`).

    An exception in an episode's `act` loses that episode only: it is truncated where it stands, with `lost_worker` True
    in its infos, and a traceback is logged for each kind of exception. When all episodes of a batch are lost that way,
    the last exception is raised.

    Values of an episode that are not what `Episode` says are an EnvironmentValueError.

    Raises ValueError when an argument is out of its range.
    """

    role: ClassVar[tuple[str, ...]] = ("You are an agent that acts in a textual world to fulfil a task.",)
    """First lines of chat prompts: who the agent is and how its world works."""
    verl_agent: ClassVar[VerlAgentStyle | None] = None
    """The style "verl-agent", where the environment has it."""

    def __init__(self, max_turns: int, outcome_scale: float = 10.0, prompt_style: str = "chat") -> None:
        styles = (*PROMPT_STYLES, *([VERL_AGENT] if self.verl_agent is not None else []))
        check_settings(max_turns, outcome_scale, prompt_style, styles)
        self.max_turns = max_turns
        self.outcome_scale = float(outcome_scale)
        self.prompt_style = prompt_style
        self._places: list[_Place] | None = None
        self._failures = LossLog(logger)

    @abstractmethod
    def start(self, task: Any, seed: int) -> Episode:
        """A new episode. The same task and seed must give the same episode, whatever else is in the batch."""

    # The contract

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        """Start one episode per pair. Raises ValueError when there are none or the lengths differ, TypeError when a
        seed is no integer, and what `start` raises."""
        check_starts(tasks, seeds)
        self._close_episodes()
        started: list[_Place] = []
        self._places = started  # so that `close` finds those that were started before one fails
        for task, seed in zip(tasks, seeds, strict=True):
            started.append(_Place(self.start(task, int(seed))))
        return self._report()

    def step(self, actions: Sequence[str]) -> StepResult:
        """Advance every episode by one action; see `BatchedEnv.step`.

        Raises RuntimeError before the first reset, ValueError when the number of actions is not that of the episodes,
        TypeError when an action is not a string.
        """
        places = self._started("step")
        check_actions(actions, len(places))
        rewards = np.zeros(len(places), np.float32)
        for i, (place, action) in enumerate(zip(places, actions, strict=True)):
            if place.ended:
                place.valid, place.episode.dense_reward = True, 0.0
                continue
            self._act(place, action)
            if place.episode.ended and place.episode.won and not place.lost:
                rewards[i] = self.outcome_scale
        observations, infos = self._report()
        terminated = np.array([place.episode.ended and not place.lost for place in places])
        truncated = np.array([place.truncated for place in places])
        return observations, rewards, terminated, truncated, infos

    def _act(self, place: _Place, action: str) -> None:
        episode = place.episode
        episode.dense_reward = 0.0
        try:
            place.valid = episode.act(action)
        except Exception as error:
            place.lost = place.truncated = True
            assert self._places is not None
            if all(other.lost for other in self._places):
                raise
            text = f"an episode of {episode.task!r} is lost: {action!r} raised {error!r}"
            trace = "".join(traceback.format_exception(error))
            self._failures.warn((type(error).__name__, place_of(error)), text, trace)
        place.turns += 1
        if place.turns >= self.max_turns and not episode.ended:
            place.truncated = True

    def render_prompt(self, context: PromptContext) -> str:
        if self._verl_agent is not None:
            return self._verl_agent.prompt(context)
        return self.compact_prompt(context) if self.prompt_style == "compact" else chat_prompt(self.role, context)

    def compact_prompt(self, context: PromptContext) -> str:
        """The bare facts, a line each: task, the last turns, the current observation, admissible actions."""
        lines = [f"task: {context.task}"]
        lines += [f"{observation} > {action}" for observation, action in context.history]
        lines += [context.observation, " | ".join(context.admissible_actions), ">"]
        return "\n".join(line for line in lines if line)

    def render_reply(self, context: PromptContext) -> str:
        if self._verl_agent is not None:
            return self._verl_agent.reply(context)
        return f"{context.observation}\n>" if self.prompt_style == "compact" else chat_reply(context)

    def project(self, response: str) -> tuple[str, bool]:
        """The action in a response and whether it was well formed: "compact" the whole response, lower-cased, when it
        is not empty; "chat" see `wording.project_tags`; "verl-agent" see `VerlAgentStyle.project`."""
        if self._verl_agent is not None:
            return self._verl_agent.project(response)
        if self.prompt_style == "chat":
            return project_tags(response)
        action = " ".join(response.lower().split())
        return action, bool(action)

    def render_action(self, action: str) -> str:
        """A response that `project` turns into the given action."""
        return action if self.prompt_style == "compact" else tagged(action)

    def snapshot(self) -> EpisodesSnapshot:
        """A copy of the state of all episodes. Raises RuntimeError before the first reset or without snapshots."""
        if not self.has_snapshots:
            return super().snapshot()
        return _copied(self._started("snapshot"))

    def restore(self, state: EpisodesSnapshot) -> tuple[list[str], list[Info]]:
        """Go back to a snapshot, which can be restored again. Raises TypeError when `state` is none."""
        if not self.has_snapshots:
            return super().restore(state)
        if not isinstance(state, EpisodesSnapshot):
            raise TypeError(f"state must be an EpisodesSnapshot from snapshot(); got {type(state).__name__}")
        self._close_episodes()
        self._places = list(_copied(state.places).places)
        return self._report()

    def close(self) -> None:
        self._close_episodes()

    # Who acts, other than a model

    def random_actions(self, rng: np.random.Generator, *, admissible: bool = True) -> list[str]:
        """One uniformly random admissible action per episode, "" for those that have ended.

        rng: one draw per episode, ended or not, so that what an episode gets depends on its position only.
        admissible: False is not different here, since the possible actions cannot be listed.

        Raises RuntimeError before the first reset.
        """
        places = self._started("random_actions")
        draws = rng.random(len(places)).tolist()
        choices = [() if place.ended else place.episode.admissible_actions for place in places]
        return [
            options[int(draw * len(options))] if options else "" for options, draw in zip(choices, draws, strict=True)
        ]

    # Inside

    @property
    def _verl_agent(self) -> VerlAgentStyle | None:
        """That style, where it is the chosen one."""
        return self.verl_agent if self.prompt_style == VERL_AGENT else None

    @property
    def episodes(self) -> list[Episode]:
        """The episodes of the batch. Raises RuntimeError before the first reset."""
        return [place.episode for place in self._started("episodes")]

    def _started(self, what: str) -> list[_Place]:
        if self._places is None:
            raise RuntimeError(f"call reset (or restore) before {what}")
        return self._places

    def _close_episodes(self) -> None:
        places, self._places = self._places or [], None
        for place in places:
            place.episode.close()

    def _report(self) -> tuple[list[str], list[Info]]:
        """Observations and infos of the current moment."""
        places = self._started("_report")
        for i, place in enumerate(places):
            check_episode(self, place.episode, i, place.valid, place.lost)
        return [place.episode.observation for place in places], [_info(place) for place in places]


class ExpertEnv(EpisodeEnv):
    """An EpisodeEnv whose episodes are `ExpertEpisode`s, for demonstrations (`rspo.engines.Scripted`)."""

    def expert_actions(self) -> list[str]:
        """The expert's next action for every episode, "" for those that have ended. Raises RuntimeError before the
        first reset."""
        actions = []
        for place in self._started("expert_actions"):
            assert isinstance(place.episode, ExpertEpisode)
            actions.append("" if place.ended else place.episode.expert_action())
        return actions


def _info(place: _Place) -> Info:
    episode = place.episode
    return {
        "task": episode.task,
        "task_type": episode.task_type,
        "anchor": episode.observation if episode.anchor is None else episode.anchor,
        "admissible_actions": [] if place.ended else list(episode.admissible_actions),
        "is_action_valid": place.valid,
        "won": episode.won and not place.lost,
        "task_score": float(episode.score),
        "dense_reward": float(episode.dense_reward),
        "lost_worker": place.lost,
    }


def _copied(places: Sequence[_Place]) -> EpisodesSnapshot:
    return EpisodesSnapshot(tuple(_Place(p.episode.copy(), p.turns, p.valid, p.truncated, p.lost) for p in places))


__all__ = ["Episode", "EpisodeEnv", "EpisodesSnapshot", "ExpertEnv", "ExpertEpisode"]

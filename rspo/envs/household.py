"""The embedded environment: a household in which an agent finds, cleans, heats, cools and puts away things.

It needs no data, runs in numpy over the batch and holds what a study of outcome and process rewards needs: an outcome
reward at the end only, a shaped dense reward that helps at first and can be exploited (taking and processing pay every
time), a scripted expert, held-out combinations of (kind, object, destination), snapshots.

An action is a verb and a word: `go`/`open` with a place, `take`/`put`/`clean`/`heat`/`cool` with an object. One sees
what is at one's own place unless it is closed, holds one thing at a time, puts it where one stands, and processes what
one holds at the sink (clean), microwave (heat) or fridge (cool); the latest processing is the thing's condition.

Two styles of prompt: "compact", for a small word-level model, in which every prompt has `COMPACT_PROMPT_WORDS` words of
`VOCABULARY`; and "chat", English for a pre-trained model, which thinks and then answers inside tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rspo.envs.arguments import check_actions, check_settings, check_starts
from rspo.envs.base import BatchedEnv, Info, PromptContext, StepResult
from rspo.envs.household_rules import (
    NOTHING,
    DenseRewards,
    HouseholdState,
    admissible_actions,
    advance,
    expert_action_numbers,
    sights_of,
    start_state,
)
from rspo.envs.household_world import (
    ACTION_IDS,
    ACTIONS,
    CONDITIONS,
    HELD_OUT_TASKS,
    OBJECTS,
    PLACE_NAMES,
    PLACES,
    TRAIN_TASKS,
    VERBS,
    VOCABULARY,
    HouseholdTask,
)
from rspo.envs.wording import PROMPT_STYLES, chat_prompt, chat_reply, project_tags, tagged

SHOWN_THINGS = 3
COMPACT_OBSERVATION_WORDS = 4 + SHOWN_THINGS
COMPACT_PROMPT_WORDS = 3 + 2 * (2 + COMPACT_OBSERVATION_WORDS)


@lru_cache(maxsize=1 << 14)
def _shown(things: tuple[int, ...], goal: int) -> str:
    """The SHOWN_THINGS words of a compact observation; of more things than that, the goal object is among those."""
    shown = list(things[:SHOWN_THINGS])
    if goal in things and goal not in shown:
        shown[-1] = goal
    return " ".join([OBJECTS[thing] for thing in shown] + ["none"] * (SHOWN_THINGS - len(shown)))


_CLOSED = " ".join(["closed"] + ["none"] * (SHOWN_THINGS - 1))


class HouseholdEnv(BatchedEnv):
    """A batch of household episodes; see the module's docstring for the rules and `BatchedEnv` for the contract.

    max_turns: actions allowed; the expert needs up to 11.
    outcome_scale: reward of the last turn of a won episode (10 in the paper's code base), 0 for any other turn.
    prompt_style: "compact" or "chat"; decides on observations, prompts, goal texts and projection.
    dense_rewards: the constants of infos["dense_reward"].

    `task_score` is 1.0 when won, else 0.0. The anchor is the full description of what the agent can see and holds,
    without the note that an action failed: the same state has the same anchor in either style.

    Raises ValueError when an argument is out of its range.
    """

    has_dense_reward = True
    has_snapshots = True

    def __init__(
        self,
        max_turns: int = 12,
        outcome_scale: float = 10.0,
        prompt_style: str = "compact",
        dense_rewards: DenseRewards | None = None,
    ) -> None:
        check_settings(max_turns, outcome_scale, prompt_style)
        if dense_rewards is not None and not isinstance(dense_rewards, DenseRewards):
            raise ValueError(f"dense_rewards must be a DenseRewards; got {dense_rewards!r}")
        self.max_turns = max_turns
        self.outcome_scale = float(outcome_scale)
        self.prompt_style = prompt_style
        self.dense_rewards = dense_rewards or DenseRewards()
        self._state: HouseholdState | None = None

    # The contract

    def tasks(self, split: str = "train") -> tuple[HouseholdTask, ...]:
        """The 461 training or 115 held-out tasks. Raises ValueError for another split than "train" and "eval"."""
        if split == "train":
            return TRAIN_TASKS
        if split == "eval":
            return HELD_OUT_TASKS
        raise ValueError(f"split must be one of train, eval; got {split!r}")

    def reset(self, tasks: Sequence[HouseholdTask], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        """Start one episode per pair. Raises ValueError when there are none or the lengths differ, TypeError when an
        element is no HouseholdTask or no integer."""
        check_starts(tasks, seeds)
        for i, task in enumerate(tasks):
            if not isinstance(task, HouseholdTask):
                raise TypeError(f"tasks[{i}] must be a HouseholdTask; got {task!r}")
        self._state = start_state(tasks, seeds)
        return self._report(self._state)

    def step(self, actions: Sequence[str]) -> StepResult:
        """Advance every episode by one action; see `BatchedEnv.step`.

        Raises RuntimeError before the first reset, ValueError when the number of actions is not that of the episodes,
        TypeError when an action is not a string.
        """
        state = self._started("step")
        check_actions(actions, len(state.tasks))
        numbers = np.array([ACTION_IDS.get(action, -1) for action in actions], np.int64)
        won_now = advance(state, numbers, max_turns=self.max_turns, pay=self.dense_rewards)
        observations, infos = self._report(state)
        rewards = (self.outcome_scale * won_now).astype(np.float32)
        return observations, rewards, state.won.copy(), state.truncated.copy(), infos

    def render_prompt(self, context: PromptContext) -> str:
        return _compact_prompt(context) if self.prompt_style == "compact" else chat_prompt(_ROLE, context)

    def render_reply(self, context: PromptContext) -> str:
        if self.prompt_style == "compact":
            return context.observation
        return chat_reply(context)

    def project(self, response: str) -> tuple[str, bool]:
        """The action in a response and whether it was well formed.

        "compact": the response is the action itself, well formed when it is one of ACTIONS. "chat": see
        `wording.project_tags`.
        """
        if self.prompt_style == "compact":
            action = " ".join(response.lower().split())
            return action, action in ACTION_IDS
        return project_tags(response)

    def render_action(self, action: str) -> str:
        """A response that `project` turns into the given action."""
        return action if self.prompt_style == "compact" else tagged(action)

    def vocabulary(self) -> tuple[str, ...] | None:
        return VOCABULARY if self.prompt_style == "compact" else None

    def snapshot(self) -> HouseholdState:
        """A copy of the state of all episodes. Raises RuntimeError before the first reset."""
        return self._started("snapshot").copy()

    def restore(self, state: HouseholdState) -> tuple[list[str], list[Info]]:
        """Go back to a snapshot of this or another HouseholdEnv; the snapshot can be restored again.

        Raises TypeError when `state` is no snapshot of a HouseholdEnv.
        """
        if not isinstance(state, HouseholdState):
            raise TypeError(f"state must be a HouseholdState from snapshot(); got {type(state).__name__}")
        self._state = state.copy()
        return self._report(self._state)

    # Who acts, other than a model

    def expert_actions(self) -> list[str]:
        """The scripted expert's next action for every episode, "" for those that have ended.

        It looks through the goal object's usual places in their order, one after the other from where it stands, and
        then brings the object to its tool and its destination. That is a function of the task and of what the current
        observation shows, so it can be imitated without memory and works from any state. One exception uses the true
        state: when the object has been put down where the search would not look, the expert goes straight there, as
        an agent does that remembers where it put it. Things that are not the goal object are put down on the spot.

        Raises RuntimeError before the first reset.
        """
        state = self._started("expert_actions")
        numbers = expert_action_numbers(state).tolist()
        return ["" if ended else ACTIONS[a] for a, ended in zip(numbers, state.ended.tolist(), strict=True)]

    def random_actions(self, rng: np.random.Generator, *, admissible: bool = True) -> list[str]:
        """One uniformly random action per episode, "" for those that have ended.

        rng: one draw per episode, ended or not, so that what an episode gets depends on its position only.
        admissible: among what is admissible now; otherwise among all of ACTIONS, most of which fail.

        Raises RuntimeError before the first reset.
        """
        state = self._started("random_actions")
        draws = rng.random(len(state.tasks)).tolist()
        choices: Sequence[Sequence[str]] = (
            admissible_actions(state, sights_of(state))
            if admissible
            else [() if ended else ACTIONS for ended in state.ended.tolist()]
        )
        return [
            options[int(draw * len(options))] if options else "" for options, draw in zip(choices, draws, strict=True)
        ]

    # Inside

    def _started(self, method: str) -> HouseholdState:
        if self._state is None:
            raise RuntimeError(f"call reset (or restore) before {method}")
        return self._state

    def _report(self, state: HouseholdState) -> tuple[list[str], list[Info]]:
        """Observations and infos of the current moment."""
        sights = sights_of(state)
        compact = self.prompt_style == "compact"
        held_condition = np.where(
            state.held == NOTHING, NOTHING, state.condition[np.arange(len(state.held)), state.held]
        )
        columns = (
            state.goal,
            state.place,
            state.held,
            held_condition,
            state.is_closed_here,
            state.failed,
            state.valid,
            state.won,
            state.dense,
        )
        observations: list[str] = []
        infos: list[Info] = []
        for task, sight, admissible, goal, place, held, condition, closed, failed, valid, won, dense in zip(
            state.tasks,
            sights,
            admissible_actions(state, sights),
            *(column.tolist() for column in columns),
            strict=True,
        ):
            name = PLACE_NAMES[place]
            look = "It is closed." if closed else f"You see: {sight.text}."
            if held == NOTHING:
                holding = "nothing"
            else:
                holding = OBJECTS[held] if condition == 0 else f"{CONDITIONS[condition]} {OBJECTS[held]}"
            anchor = f"You are at the {name}. {look} You hold: {holding}."
            if compact:
                result = "failed" if failed else "ok"
                shown = _CLOSED if closed else _shown(sight.things, goal)
                hands = "none none" if held == NOTHING else f"{CONDITIONS[condition]} {OBJECTS[held]}"
                observations.append(f"{result} {name} {shown} {hands}")
            else:
                observations.append(f"Nothing happens. {anchor}" if failed else anchor)
            infos.append(
                {
                    "task": task.words if compact else task.sentence,
                    "task_type": task.kind,
                    "anchor": anchor,
                    "admissible_actions": admissible,
                    "is_action_valid": valid,
                    "won": won,
                    "task_score": 1.0 if won else 0.0,
                    "dense_reward": dense,
                }
            )
        return observations, infos


_ROLE = (
    "You are a careful household robot, at work in a home where things must be found before they can be used.",
    "You carry one thing at a time. Some places must be opened before you see or reach what is inside. "
    "Clean at the sink, heat at the microwave, cool at the fridge, with the thing in your hands.",
)
_NO_TURN = " ".join(["none"] * (2 + COMPACT_OBSERVATION_WORDS))
_WORDS = frozenset(VOCABULARY)


def _two_words(action: str) -> str:
    """An action as exactly two words of the vocabulary, whatever the model wrote."""
    words = [word if word in _WORDS else "none" for word in action.split()[:2]]
    return " ".join(words + ["none"] * (2 - len(words)))


def _compact_prompt(context: PromptContext) -> str:
    """Task (3 words), the last 2 (action, observation that followed it) pairs (9 each): COMPACT_PROMPT_WORDS in all.

    An observation says: ok or failed; the place; three things seen there, or closed; condition and name of what is
    held. The last pair ends with the current observation; the turns before the first are filled with "none".
    """
    actions = ["none none"] + [_two_words(action) for _, action in context.history]
    observations = [observation for observation, _ in context.history] + [context.observation]
    turns = [f"{action} {observation}" for action, observation in zip(actions, observations, strict=True)][-2:]
    return " ".join([context.task] + [_NO_TURN] * (2 - len(turns)) + turns)


__all__ = [
    "ACTIONS",
    "COMPACT_PROMPT_WORDS",
    "PLACES",
    "PROMPT_STYLES",
    "VERBS",
    "VOCABULARY",
    "DenseRewards",
    "HouseholdEnv",
    "HouseholdState",
    "HouseholdTask",
]

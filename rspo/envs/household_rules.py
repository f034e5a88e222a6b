"""The household's rules over a batch: the state, what an action does to it, what it pays, what one sees, the expert.

Everything is arrays over the n episodes; text is made in `rspo.envs.household`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rspo.envs.household_world import (
    CLEAN,
    CONDITIONS,
    GO,
    HALL,
    KINDS,
    N_ARGUMENTS,
    OBJECTS,
    OPEN,
    OPENABLE,
    PLACE_NAMES,
    PLACES,
    PUT,
    SEARCH_RING,
    TAKE,
    TOOL,
    VERB_TO_CONDITION,
    HouseholdTask,
    IntArray,
    is_searched,
    start_locations,
)

BoolArray = NDArray[np.bool_]

NOTHING = -1  # held: empty hands; location: in the agent's hands


@dataclass(frozen=True)
class DenseRewards:
    """The shaped reward of one step, summed over what happened in it.

    take, process: the goal object was taken; it was given the condition that the task asks for. Both pay every time,
        which is the way to exploit this reward.
    at_tool: the goal object, not yet as wanted, is held where it can be processed. Once per episode.
    at_destination: the goal object, as wanted, is held at its destination. Once per episode.
    invalid: the action was not admissible.
    win: the task was fulfilled.
    """

    take: float = 0.4
    process: float = 0.4
    at_tool: float = 0.1
    at_destination: float = 0.2
    invalid: float = -0.05
    win: float = 1.0


@dataclass(eq=False)
class HouseholdState:
    """Everything that distinguishes one moment from another, [n] unless said otherwise.

    place: where the agent is, an index of PLACE_NAMES. held: object in its hands, -1 for none.
    location: [n, 12] place of each object, -1 in the agent's hands. condition: [n, 12] index of CONDITIONS.
    opened: [n, 13]. turn: actions taken. at_tool_paid, at_destination_paid: what pays once has been paid.
    failed: the latest action of the running episode was not admissible; valid: the same of the latest step, where an
    episode that had ended before counts as valid. dense: dense reward of the latest step.
    """

    tasks: tuple[HouseholdTask, ...]
    kind: IntArray
    goal: IntArray
    destination: IntArray
    place: IntArray
    held: IntArray
    location: IntArray
    condition: IntArray
    opened: BoolArray
    turn: IntArray
    won: BoolArray
    truncated: BoolArray
    at_tool_paid: BoolArray
    at_destination_paid: BoolArray
    failed: BoolArray
    valid: BoolArray
    dense: NDArray[np.float64]

    @property
    def ended(self) -> BoolArray:
        return self.won | self.truncated

    @property
    def is_closed_here(self) -> BoolArray:
        return OPENABLE[self.place] & ~self.opened[np.arange(len(self.place)), self.place]

    @property
    def is_ready(self) -> BoolArray:
        """Whether the goal object is as the task asks for; any condition will do for "pick"."""
        return (self.kind == 0) | (self.condition[np.arange(len(self.place)), self.goal] == self.kind)

    def copy(self) -> HouseholdState:
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(other, name, value.copy())
        return other


def start_state(tasks: Sequence[HouseholdTask], seeds: Sequence[int]) -> HouseholdState:
    n = len(tasks)
    kind, goal, destination = np.array([task.numbers for task in tasks], np.int64).T.copy()
    return HouseholdState(
        tasks=tuple(tasks),
        kind=kind,
        goal=goal,
        destination=destination,
        place=np.full(n, HALL, np.int64),
        held=np.full(n, NOTHING, np.int64),
        location=start_locations(kind, goal, destination, seeds),
        condition=np.zeros((n, len(OBJECTS)), np.int64),
        opened=np.zeros((n, len(PLACE_NAMES)), np.bool_),
        turn=np.zeros(n, np.int64),
        won=np.zeros(n, np.bool_),
        truncated=np.zeros(n, np.bool_),
        at_tool_paid=np.zeros(n, np.bool_),
        at_destination_paid=np.zeros(n, np.bool_),
        failed=np.zeros(n, np.bool_),
        valid=np.ones(n, np.bool_),
        dense=np.zeros(n, np.float64),
    )


@dataclass(frozen=True)
class Sight:
    """What is to be seen at a place: object numbers, the same in English with conditions, how to take each."""

    things: tuple[int, ...]
    text: str
    takes: tuple[str, ...]


_SIGHT_POWERS = (len(CONDITIONS) + 1) ** np.arange(len(OBJECTS))


@lru_cache(maxsize=1 << 14)
def _sight(code: int) -> Sight:
    """Decode a sum over objects of digit·5^object: digit 0 is out of sight, otherwise 1 + condition."""
    things: list[int] = []
    words: list[str] = []
    for thing, name in enumerate(OBJECTS):
        code, digit = divmod(code, len(CONDITIONS) + 1)
        if digit:
            things.append(thing)
            words.append(name if digit == 1 else f"{CONDITIONS[digit - 1]} {name}")
    return Sight(tuple(things), ", ".join(words) or "nothing", tuple(f"take {OBJECTS[thing]}" for thing in things))


_GO_FROM = tuple([f"go {place}" for place in PLACES if place != here] for here in PLACE_NAMES)
_PROCESS_AT = {int(TOOL[kind]): KINDS[kind] for kind in range(1, len(KINDS))}


def advance(state: HouseholdState, actions: IntArray, *, max_turns: int, pay: DenseRewards) -> BoolArray:
    """Apply one action number per episode (-1 for a text that is no action) in place; who won just now, [n]."""
    rows = np.arange(len(actions))
    active = ~state.ended
    verb, word = np.divmod(np.where(active, actions, -1), N_ARGUMENTS)  # -1 becomes verb -1, which is none
    place, closed = state.place, state.is_closed_here
    empty_hands = state.held == NOTHING

    go = (verb == GO) & (word != place)
    open_ = (verb == OPEN) & (word == place) & closed
    take = (verb == TAKE) & empty_hands & (state.location[rows, word] == place) & ~closed
    put = (verb == PUT) & (state.held == word) & ~closed
    process = (verb >= CLEAN) & (state.held == word) & (TOOL[verb - VERB_TO_CONDITION] == place)
    valid = go | open_ | take | put | process

    state.place[go] = word[go]
    state.opened[rows[open_], place[open_]] = True
    state.location[rows[take], word[take]] = NOTHING
    state.held[take] = word[take]
    state.location[rows[put], word[put]] = place[put]
    state.held[put] = NOTHING
    state.condition[rows[process], word[process]] = verb[process] - VERB_TO_CONDITION

    ready = state.is_ready
    on_goal = word == state.goal
    carrying = active & (state.held == state.goal)
    at_tool = carrying & ~ready & (state.place == TOOL[state.kind]) & ~state.at_tool_paid
    at_destination = carrying & ready & (state.place == state.destination) & ~state.at_destination_paid
    won_now = put & on_goal & ready & (state.place == state.destination)

    state.dense = (
        pay.take * (take & on_goal)
        + pay.process * (process & on_goal & (verb - VERB_TO_CONDITION == state.kind))
        + pay.at_tool * at_tool
        + pay.at_destination * at_destination
        + pay.invalid * (active & ~valid)
        + pay.win * won_now
    )
    state.at_tool_paid |= at_tool
    state.at_destination_paid |= at_destination
    state.failed = np.where(active, ~valid, state.failed)
    state.valid = valid | ~active
    state.turn += active
    state.won |= won_now
    state.truncated |= active & ~won_now & (state.turn >= max_turns)
    return won_now


def sights_of(state: HouseholdState) -> list[Sight]:
    visible = (state.location == state.place[:, None]) & ~state.is_closed_here[:, None]
    codes = (visible * (state.condition + 1)) @ _SIGHT_POWERS
    return [_sight(code) for code in codes.tolist()]


def admissible_actions(state: HouseholdState, sights: list[Sight]) -> list[list[str]]:
    """What each episode would accept now; nothing where it has ended."""
    columns = (state.place, state.held, state.is_closed_here, state.ended)
    result: list[list[str]] = []
    for sight, place, held, closed, ended in zip(sights, *(column.tolist() for column in columns), strict=True):
        if ended:
            result.append([])
            continue
        actions = _GO_FROM[place].copy()
        if closed:
            actions.append(f"open {PLACES[place]}")
        if held == NOTHING:
            actions.extend(sight.takes)
        else:
            if not closed:
                actions.append(f"put {OBJECTS[held]}")
            if place in _PROCESS_AT:
                actions.append(f"{_PROCESS_AT[place]} {OBJECTS[held]}")
        result.append(actions)
    return result


def expert_action_numbers(state: HouseholdState) -> IntArray:
    """The scripted expert's next action, [n] action numbers; `HouseholdEnv.expert_actions` says what it knows."""
    rows = np.arange(len(state.tasks))
    place, goal, held, closed = state.place, state.goal, state.held, state.is_closed_here

    where = state.location[rows, goal]
    astray = ~is_searched(goal, state.destination, where)
    look_at = np.where(astray, where, SEARCH_RING[goal, state.destination, place])
    searched_here = is_searched(goal, state.destination, place)
    ready = state.is_ready
    bring_to = np.where(ready, state.destination, TOOL[state.kind])
    has_goal, has_other = held == goal, (held != goal) & (held != NOTHING)
    there = has_goal & (place == bring_to)

    action: IntArray = np.select(
        [
            has_goal & ~there,
            there & ~ready,
            (there | has_other) & closed,
            there | has_other,
            (where == place) & ~closed,
            closed & searched_here,
        ],
        [
            GO * N_ARGUMENTS + bring_to,
            (state.kind + VERB_TO_CONDITION) * N_ARGUMENTS + goal,
            OPEN * N_ARGUMENTS + place,
            PUT * N_ARGUMENTS + held,
            TAKE * N_ARGUMENTS + goal,
            OPEN * N_ARGUMENTS + place,
        ],
        default=GO * N_ARGUMENTS + look_at,
    )
    return action

"""How far a game has come, from the facts of its goal: the dense reward.

The progress of a state, by type of task (a goal object is any object of the goal's type):

- pick_and_place_simple: 1/2 with a goal object in hand, 1 when it is in its receptacle.
- pick_clean_then_place_in_recep, pick_heat_..., pick_cool_...: 1/3 with a goal object in hand, 2/3 when that object is
  clean (hot, cool), 1 when such an object is in its receptacle.
- look_at_obj_in_light: 1/3 with a goal object in hand, 2/3 when one also stands at the lamp or has used it, 1 when
  both.
- pick_two_obj_and_place: 1/2 for each goal object in the same receptacle, 1/4 for one in hand.

It is measured from the state in which the game starts, which may have something done already, and is 1 exactly when
the game is won. A step's reward is what it adds to the best progress so far: nothing can be earned twice, and the
rewards of a won game add up to 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from .games import Goal

FACTS = ("holds", "inreceptacle", "isclean", "ishot", "iscool", "istoggled", "atlocation", "receptacleatlocation")


class Game(Protocol):
    """What is needed of a game under way (`FastGame` or `PlainGame`)."""

    goal: Goal
    observation: str
    commands: list[str]
    won: bool

    def act(self, command: str) -> bool: ...
    def facts(self, *predicates: str) -> Iterator[tuple[str, tuple[str, ...]]]: ...
    def copy(self) -> Game: ...


class Progress:
    """The best progress of a game so far, in [0, 1]."""

    def __init__(self, game: Game) -> None:
        self.goal = game.goal
        self.best = 0.0
        self._objects = named(game, "objecttype", self.goal.object_type)
        self._receptacles = named(game, "receptacletype", self.goal.receptacle_type)
        self._lamps = named(game, "objecttype", self.goal.lamp_type)
        self._start = self._state_value(game)

    def advance(self, game: Game) -> float:
        """What the game's state adds to the best progress."""
        now = 1.0 if game.won else max(self._state_value(game) - self._start, 0.0) / (1.0 - self._start)
        added = max(now - self.best, 0.0)
        self.best = max(now, self.best)
        return added

    def copy(self) -> Progress:
        """One that goes on independently."""
        new = Progress.__new__(Progress)
        new.__dict__.update(self.__dict__)
        return new

    def _state_value(self, game: Game) -> float:
        """Below 1, whether the game is won or not."""
        facts = list(game.facts(*FACTS))
        held = {names[1] for predicate, names in facts if predicate == "holds"} & self._objects
        if self.goal.task_type == "pick_two_obj_and_place":
            inside = Counter(
                receptacle
                for predicate, (thing, receptacle) in _pairs(facts, "inreceptacle")
                if thing in self._objects and receptacle in self._receptacles
            )
            placed = min(max(inside.values(), default=0), 1)  # two of them win
            return placed / 2 + (1 / 4 if held else 0)
        if not held:
            return 0.0
        if self.goal.task_type == "pick_and_place_simple":
            return 1 / 2
        if self.goal.condition is not None:
            ready = {names[0] for predicate, names in facts if predicate == self.goal.condition}
            return 2 / 3 if held & ready else 1 / 3
        return 2 / 3 if self._is_lit(facts) else 1 / 3

    def _is_lit(self, facts: list[tuple[str, tuple[str, ...]]]) -> bool:
        """Whether the agent stands at a lamp, or one has been used."""
        if any(names[0] in self._lamps for predicate, names in facts if predicate == "istoggled"):
            return True
        here = {names[1] for predicate, names in facts if predicate == "atlocation"}
        near = {names[0] for predicate, names in facts if predicate == "receptacleatlocation" and names[1] in here}
        return any(
            thing in self._lamps and receptacle in near for _, (thing, receptacle) in _pairs(facts, "inreceptacle")
        )


def named(game: Game, predicate: str, type_: str | None) -> frozenset[str]:
    """The names of a game's objects or receptacles of a type."""
    found = [names for _, names in game.facts(predicate)] if type_ is not None else []
    return frozenset(name for name, its_type in found if its_type.strip() == type_)


def _pairs(facts: list[tuple[str, tuple[str, ...]]], wanted: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    return ((predicate, names) for predicate, names in facts if predicate == wanted)

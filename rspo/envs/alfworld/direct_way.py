"""The direct way to a game's goal: the next command, worked out from the facts.

It knows where everything is. It shows whether a game can be won, and helps the expert out where that is at a loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .placing import by_new_words
from .progress import Game, named

_VERBS = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}
_TOOLS = {"isclean": ("sinkbasintype", "bathtubbasintype"), "ishot": ("microwavetype",), "iscool": ("fridgetype",)}


def direct_command(game: Game) -> str | None:
    """The next command on a direct way from the game's state to its goal, or None where there is none to be seen."""
    situation = _Situation(game)
    command = situation.command()
    return None if command is None else situation.commands[command]


def win_directly(game: Game, commands: list[str], limit: int = 60) -> bool:
    """Play a game to its end on the direct way, and add what was done to `commands`; whether it was won."""
    for _ in range(limit):
        if game.won:
            break
        command = direct_command(game)
        if command is None:
            break
        game.act(command)
        commands.append(command)
    return game.won


class _Situation:
    """What is where. commands: those of the game by their new words, in which the way is worked out."""

    def __init__(self, game: Game) -> None:
        self.goal = game.goal
        self.commands = by_new_words(game.commands)
        facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for predicate, names in game.facts():
            facts[predicate].append(names)
        self.facts = facts
        here = {names[1] for names in facts["atlocation"]}
        self.near = {names[0] for names in facts["receptacleatlocation"] if names[1] in here}
        self.place_of = dict(sorted((names[0], names[1]) for names in facts["inreceptacle"]))
        self.held = min((names[1] for names in facts["holds"]), default=None)
        self.objects = named(game, "objecttype", self.goal.object_type)
        self.receptacles = named(game, "receptacletype", self.goal.receptacle_type)
        self.lamps = named(game, "objecttype", self.goal.lamp_type)

    def command(self) -> str | None:
        if self.held is None:
            return self._fetch()
        if self.held not in self.objects:
            return self._put_away(self.held)
        if self.goal.lamp_type is not None:
            return self._first(self._at(self.place_of[lamp], f"use {lamp}") for lamp in self._usable_lamps())
        condition = self.goal.condition
        if condition is not None and self.held not in {names[0] for names in self.facts[condition]}:
            tools = self._of_types(*_TOOLS[condition])
            return self._first(self._at(tool, f"{_VERBS[condition]} {self.held} with {tool}") for tool in tools)
        return self._first(self._at(place, f"move {self.held} to {place}") for place in self._destinations())

    def _fetch(self) -> str | None:
        """Towards a goal object that is not where it belongs; one that is near comes first."""
        destination = self._destinations()[:1]
        ready = {names[0] for names in self.facts[self.goal.condition or ""]}
        there = [
            thing
            for thing in self.objects & set(self.place_of)
            if not (self.place_of[thing] in destination and (self.goal.condition is None or thing in ready))
        ]
        order = sorted(there, key=lambda thing: (thing not in ready, self.place_of[thing] not in self.near, thing))
        return self._first(
            self._at(self.place_of[thing], f"take {thing} from {self.place_of[thing]}") for thing in order
        )

    def _put_away(self, held: str) -> str | None:
        """Anything in hand that is not wanted goes where it can be put down, here if possible."""
        here = sorted(command for command in self.commands if command.startswith(f"move {held} to "))
        if here:
            return here[0]
        kinds = {names[1] for names in self.facts["objecttype"] if names[0] == held}
        fitting = {names[0] for names in self.facts["cancontain"] if names[1] in kinds}
        places = sorted(names[0] for names in self.facts["receptacletype"] if names[1] in fitting)
        places.sort(key=lambda place: self._is_closed(place))
        return self._first(self._at(place, f"move {held} to {place}") for place in places)

    def _destinations(self) -> list[str]:
        """Receptacles of the goal, the one that holds most of the goal objects first."""
        inside = [self.place_of[thing] for thing in self.objects if thing in self.place_of]
        return sorted(self.receptacles, key=lambda place: (-inside.count(place), self._is_closed(place), place))

    def _usable_lamps(self) -> list[str]:
        usable = {names[0] for names in self.facts["toggleable"]}
        return sorted(lamp for lamp in self.lamps & usable if lamp in self.place_of)

    def _of_types(self, *types: str) -> list[str]:
        found = [
            (types.index(names[1].strip()), names[0])
            for names in self.facts["receptacletype"]
            if names[1].strip() in types
        ]
        return [name for _, name in sorted(found)]

    def _is_closed(self, place: str) -> bool:
        return (place,) in self.facts["openable"] and (place,) not in self.facts["opened"]

    def _at(self, place: str, command: str) -> str | None:
        """A command that is to be given at a place, or what comes before it."""
        if place not in self.near:
            wanted = f"go to {place}"
        elif command not in self.commands and self._is_closed(place):
            wanted = f"open {place}"
        else:
            wanted = command
        return wanted if wanted in self.commands else None

    @staticmethod
    def _first(commands: Iterable[str | None]) -> str | None:
        return next((command for command in commands if command is not None), None)

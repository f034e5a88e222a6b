"""Rooms for generated games, from the alfworld package's files: what furniture stands where, what may be on it.

The package has for each of its 120 rooms (30 each of kitchens, living rooms, bedrooms, bathrooms) the kinds of things
in it, and for most of its receptacles a position and the place from which they are reached. Things are put where the
package says that their kind may be, at the density of the official games.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .upstream import alfworld

COPIES = (0.44, 0.32, 0.24)
"""Shares of the kinds in a room of which there are one, two, three things, as in the official games."""

CLOSED_WEIGHT = 0.33
"""How likely a thing is in a receptacle that must be opened, beside one that need not: in the official games a fifth of
the things are in such receptacles, which are almost half of all."""

COUNTS = {"StoveBurner": 4, "StoveKnob": 4}
"""How many there are of kinds without positions; of all others one."""

LAMP_PLACES = ("Desk", "SideTable", "Dresser", "Shelf", "DiningTable", "CoffeeTable", "Drawer", "Bed")
"""Where a desk lamp stands: on the first of these that a room has."""


@dataclass(frozen=True)
class Receptacle:
    """Something that holds things. name: its PDDL name; location: the place where one stands at it."""

    name: str
    kind: str
    location: str
    openable: bool


@dataclass(frozen=True)
class Room:
    """A room of the package.

    number: 1 to 30 kitchens, 201 to 230 living rooms, 301 to 330 bedrooms, 401 to 430 bathrooms.
    things: kinds of things that can be carried.
    fixtures: kinds of things that cannot.
    """

    number: int
    kind: str
    receptacles: tuple[Receptacle, ...]
    things: tuple[str, ...]
    fixtures: tuple[str, ...]

    @property
    def receptacle_kinds(self) -> tuple[str, ...]:
        return tuple(sorted({receptacle.kind for receptacle in self.receptacles}))

    def that_hold(self, kind: str) -> list[Receptacle]:
        """The receptacles that may hold things of a kind."""
        return [receptacle for receptacle in self.receptacles if kind in holds()[receptacle.kind]]


@dataclass
class Thing:
    """Something that is not a receptacle of the room. place: the receptacle it is in, None for one beside them."""

    name: str
    kind: str
    location: str
    place: Receptacle | None
    portable: bool


@dataclass
class Furnished:
    """A room with things in it. start: where the agent stands, away from everything."""

    room: Room
    things: list[Thing] = field(default_factory=list)
    start: str = "loc_bar_start"


def holds() -> dict[str, set[str]]:
    """The kinds of things that each kind of receptacle may hold."""
    known: dict[str, set[str]] = alfworld("gen.constants").VAL_RECEPTACLE_OBJECTS
    return known


def can_be(affordance: str) -> set[str]:
    """The kinds of things that are "Cleanable", "Heatable", "Coolable", "Sliceable" or "Toggleable"."""
    kinds: set[str] = alfworld("gen.constants").VAL_ACTION_OBJECTS[affordance]
    return kinds


def movable_receptacles() -> set[str]:
    """Kinds of things that can be carried and hold others."""
    return set(alfworld("gen.constants").MOVABLE_RECEPTACLES)


def room_numbers(unseen: bool) -> list[int]:
    """The rooms of the official training games, or those that only the official unseen games are in."""
    constants = alfworld("gen.constants")
    return sorted(constants.TEST_SCENE_NUMBERS if unseen else constants.TRAIN_SCENE_NUMBERS)


@lru_cache(maxsize=128)
def load_room(number: int) -> Room:
    """A room of the package."""
    constants = alfworld("gen.constants")
    folder = Path(alfworld("gen.constants").__file__).parent / "layouts"
    kinds: list[str] = json.loads((folder / f"FloorPlan{number}-objects.json").read_bytes())
    positions: dict[str, list[float]] = json.loads((folder / f"FloorPlan{number}-openable.json").read_bytes())
    receptacles = sorted(_placed(positions), key=lambda receptacle: receptacle.name)
    known = set(holds()) - movable_receptacles()
    missing = sorted((set(kinds) & known) - {receptacle.kind for receptacle in receptacles})
    for kind in missing:
        for i in range(1, COUNTS.get(kind, 1) + 1):
            openable = kind in constants.OPENABLE_CLASS_LIST
            name = f"{kind}_bar_{i:02d}"
            if kind.endswith("Basin"):  # the game says "sinkbasin 1" of Sink_bar_01_bar_SinkBasin
                name = f"{kind.removesuffix('Basin')}_bar_{i:02d}_bar_{kind}"
            receptacles.append(Receptacle(name, kind, f"loc_bar_{kind.lower()}_{i:02d}", openable))
    portable = set().union(*(allowed for kind, allowed in holds().items() if kind in known))
    objects = set(kinds) & set(constants.OBJECTS) - known
    (room_kind,) = [kind for kind, numbers in constants.SCENE_TYPE.items() if number in numbers]
    return Room(
        number,
        room_kind,
        tuple(receptacles),
        tuple(sorted(objects & portable)),
        tuple(sorted(objects - portable)),
    )


def _placed(positions: dict[str, list[float]]) -> Iterator[Receptacle]:
    """The receptacles of the package's file of positions: "Bed|-00.64|+00.00|+00.87" to [x, z, turn, tilt]."""
    constants = alfworld("gen.constants")
    for key, (x, z, turn, tilt) in positions.items():
        parts = key.split("|")
        kind = parts[-1] if parts[-1].endswith("Basin") else parts[0]
        if kind in holds():
            steps = (round(x / 0.25), round(z / 0.25), round(turn / 90) % 4, round(tilt))
            location = "loc" + "".join(f"_bar_{step}".replace("-", "_minus_") for step in steps)
            yield Receptacle(_pddl_name(key), kind, location, kind in constants.OPENABLE_CLASS_LIST)


def _pddl_name(key: str) -> str:
    for mark, word in (("|", "_bar_"), ("-", "_minus_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_")):
        key = key.replace(mark, word)
    return key


def furnish(room: Room, rng: random.Random, *, at_least: dict[str, int], not_in: dict[str, str]) -> Furnished | None:
    """Put things into a room.

    at_least: numbers of things of some kinds.
    not_in: kinds of receptacles that things of some kinds are not put into.

    None where there is no place for one of the kinds in `at_least`.
    """
    furnished = Furnished(room)
    for kind in room.things:
        copies = max(rng.choices((1, 2, 3), COPIES)[0], at_least.get(kind, 0))
        places = [place for place in room.that_hold(kind) if place.kind != not_in.get(kind)]
        if not places and kind in at_least:
            return None
        weights = [CLOSED_WEIGHT if place.openable else 1.0 for place in places]
        for i in range(1, copies + 1):
            if places:
                place = rng.choices(places, weights)[0]
                furnished.things.append(Thing(f"{kind}_bar_{i:02d}", kind, place.location, place, True))
    for kind in room.fixtures:
        for i in range(1, COUNTS.get(kind, 1) + 1):
            name = f"{kind}_bar_{i:02d}"
            stands = [place for wanted in LAMP_PLACES for place in room.receptacles if place.kind == wanted]
            if kind == "DeskLamp" and stands:
                place = rng.choice([one for one in stands if one.kind == stands[0].kind])
                furnished.things.append(Thing(name, kind, place.location, place, False))
            else:
                furnished.things.append(Thing(name, kind, f"loc_bar_{kind.lower()}_{i:02d}", None, False))
    return furnished

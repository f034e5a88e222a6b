"""The fixed facts of the household: places, objects, tasks, actions, words, and where things start.

Nothing here has state. Places, objects, verbs and conditions are numbered by their position in the tuples below;
index `HALL` is where an episode starts (no thing is ever there, and no action leads back).

All randomness is a hash of (task, seed), so an episode does not depend on the batch it runs in, on the order of
draws, or on the version of a random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

OPENABLE_PLACES = ("fridge", "microwave", "cabinet", "drawer", "cupboard")
PLACES = (*OPENABLE_PLACES, "sink", "table", "counter", "shelf", "desk", "cart", "stove")
HALL = len(PLACES)
PLACE_NAMES = (*PLACES, "hall")

# Usual places of each object in the order in which one looks for it, the likeliest first. Each place is usual for
# exactly three objects, so that an observation of three things shows all of them until the agent moves some. No object
# has three places with a door, which bounds the search at 3 walks + 2 doors.
USUAL_PLACES: dict[str, tuple[str, str, str]] = {
    "apple": ("table", "fridge", "cart"),
    "bread": ("counter", "cupboard", "microwave"),
    "egg": ("fridge", "stove", "counter"),
    "potato": ("sink", "microwave", "cabinet"),
    "tomato": ("counter", "sink", "fridge"),
    "lettuce": ("cart", "drawer", "sink"),
    "mug": ("shelf", "desk", "microwave"),
    "cup": ("desk", "cupboard", "table"),
    "plate": ("cabinet", "shelf", "table"),
    "bowl": ("cupboard", "shelf", "desk"),
    "pan": ("stove", "drawer", "cart"),
    "pot": ("stove", "cabinet", "drawer"),
}
OBJECTS = tuple(USUAL_PLACES)
USUAL_SHARES = (1 / 2, 1 / 3, 1 / 6)

# A task's kind is numbered like the condition it asks for; "pick" asks for none.
KINDS = ("pick", "clean", "heat", "cool")
CONDITIONS = ("plain", "clean", "hot", "cold")
TOOL_PLACES = (None, "sink", "microwave", "fridge")

VERBS = ("go", "open", "take", "put", "clean", "heat", "cool")
GO, OPEN, TAKE, PUT, CLEAN, HEAT, COOL = range(len(VERBS))
# Verb v >= CLEAN brings about the condition v - VERB_TO_CONDITION.
VERB_TO_CONDITION = CLEAN - 1

N_ARGUMENTS = len(PLACES)  # as many objects as places: action number = verb * N_ARGUMENTS + argument
ACTIONS = tuple(f"{verb} {word}" for v, verb in enumerate(VERBS) for word in (PLACES if v <= OPEN else OBJECTS))
ACTION_IDS = {action: i for i, action in enumerate(ACTIONS)}

# Every word of compact prompts and actions. The order is part of a trained model's format: append, never reorder.
VOCABULARY: tuple[str, ...] = tuple(
    dict.fromkeys((*KINDS, *VERBS, *PLACE_NAMES, *OBJECTS, *CONDITIONS, "closed", "none", "ok", "failed"))
)

EVAL_TASKS = 115
_SPLIT_SALT = 1
_LAYOUT_SALT = 2


@dataclass(frozen=True)
class HouseholdTask:
    """Bring `object` to `destination`, cleaned, heated or cooled before unless `kind` is "pick".

    Raises ValueError when a field is not a word of KINDS, OBJECTS or PLACES.
    """

    kind: str
    object: str
    destination: str

    def __post_init__(self) -> None:
        for field, allowed in (("kind", KINDS), ("object", OBJECTS), ("destination", PLACES)):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}; got {value!r}")

    @cached_property
    def numbers(self) -> tuple[int, int, int]:
        """(kind, object, destination) as positions in KINDS, OBJECTS and PLACES."""
        return KINDS.index(self.kind), OBJECTS.index(self.object), PLACES.index(self.destination)

    @property
    def words(self) -> str:
        """The goal in three words of the vocabulary."""
        return f"{self.kind} {self.object} {self.destination}"

    @property
    def sentence(self) -> str:
        """The goal as an English sentence."""
        if self.kind == "pick":
            return f"Put the {self.object} in or on the {self.destination}."
        return f"{self.kind.capitalize()} the {self.object}, then put it in or on the {self.destination}."


def hash_unit(*keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) from integer keys that broadcast together (splitmix64, folded over the keys)."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = (state ^ key) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _split_tasks() -> tuple[tuple[HouseholdTask, ...], tuple[HouseholdTask, ...]]:
    everything = [HouseholdTask(kind, thing, place) for kind in KINDS for thing in OBJECTS for place in PLACES]
    order = np.argsort(
        hash_unit(np.full(1, _SPLIT_SALT, np.uint64), np.arange(len(everything), dtype=np.uint64)), kind="stable"
    )
    held_out = set(order[:EVAL_TASKS].tolist())
    train = tuple(task for i, task in enumerate(everything) if i not in held_out)
    return train, tuple(everything[i] for i in sorted(held_out))


TRAIN_TASKS, HELD_OUT_TASKS = _split_tasks()

OPENABLE = np.array([name in OPENABLE_PLACES for name in PLACE_NAMES])  # [13] bool
TOOL = np.array([-1 if name is None else PLACES.index(name) for name in TOOL_PLACES])  # [4] by kind = condition
USUAL = np.array([[PLACES.index(name) for name in places] for places in USUAL_PLACES.values()])  # [12 objects, 3]


def _start_thresholds() -> NDArray[np.float64]:
    """[12 objects, 13 excluded places, 2]: a uniform number below the first threshold means the first usual place,
    below the second the second. A usual place that is excluded has no share; HALL excludes none."""
    shares = np.where(USUAL[:, None, :] == np.arange(HALL + 1)[None, :, None], 0.0, np.array(USUAL_SHARES))
    cumulative = np.cumsum(shares, axis=-1)
    return cumulative[..., :2] / cumulative[..., 2:]


_START_THRESHOLDS = _start_thresholds()


def start_locations(kind: IntArray, goal: IntArray, destination: IntArray, seeds: Sequence[int]) -> IntArray:
    """Where every object starts, [n, 12] place numbers, from (task, seed) alone.

    Each object is at one of its usual places; the goal object never starts at the task's destination.
    """
    task = ((kind * len(OBJECTS) + goal) * len(PLACES) + destination).astype(np.uint64)
    seed = np.array([int(s) & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
    objects = np.arange(len(OBJECTS))
    draw = hash_unit(
        np.full((1, 1), _LAYOUT_SALT, np.uint64), task[:, None], seed[:, None], objects[None, :].astype(np.uint64)
    )
    excluded = np.where(objects[None, :] == goal[:, None], destination[:, None], HALL)
    choice = (draw[..., None] >= _START_THRESHOLDS[objects[None, :], excluded]).sum(axis=-1)
    return USUAL[objects[None, :], choice]


def _search_ring() -> IntArray:
    """[12 objects, 12 destinations, 13 places]: where to look next for an object when it is not at the place."""
    ring = np.empty((len(OBJECTS), len(PLACES), HALL + 1), np.int64)
    for thing, usual in enumerate(USUAL.tolist()):
        for destination in range(len(PLACES)):
            worth = [place for place in usual if place != destination]
            ring[thing, destination, :] = worth[0]
            for here, following in zip(worth, worth[1:] + worth[:1], strict=True):
                ring[thing, destination, here] = following
    return ring


SEARCH_RING = _search_ring()


def is_searched(goal: IntArray, destination: IntArray, place: IntArray) -> NDArray[np.bool_]:
    """Whether a search for `goal` looks at `place`: one of its usual places, but not the destination. [n] bool."""
    return (USUAL[goal] == place[:, None]).any(axis=1) & (place != destination)

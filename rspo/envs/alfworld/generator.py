"""Games of our own, from the alfworld package's files alone: no download is needed.

A game is one of the six types of task in one of the package's rooms (`rspo.envs.alfworld.rooms`), as densely furnished
as the official ones, with the package's rules, grammar and goal texts. Each is played to its end before it is kept, on
the direct way (`rspo.envs.alfworld.direct_way`), which is written into it as its walkthrough. One that cannot be won is
thrown away, counted, and made anew.

Folders are named as the official ones: `<split>/<type>-<object>-None-<receptacle>-<room>/trial_<number>/`. Splits
differ in their combinations of type, object, receptacle and room: `train` and `valid_seen` are in the rooms of the
official training games, `valid_unseen` in the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...config.lock import LOCK_FILE, FolderLock
from ...config.storage import write_text
from .direct_way import win_directly
from .games import GAME_FILE, TASK_TYPES, GameFile, read_goal
from .rooms import Furnished, can_be, furnish, holds, load_room, movable_receptacles, room_numbers
from .speed import FastGame
from .upstream import GameError, alfworld, check_installed

SETTINGS_FILE = "generation.json"
"""In the folder of generated games: what the games follow from, so that a generation can go on."""
ATTEMPTS = 200
"""Games that may be thrown away for each that is kept."""
TRIAL, PART = "trial_", ".part-"

_CONDITIONS = {
    "pick_clean_then_place_in_recep": ("Cleanable", ("SinkBasin", "BathtubBasin")),
    "pick_heat_then_place_in_recep": ("Heatable", ("Microwave",)),
    "pick_cool_then_place_in_recep": ("Coolable", ("Fridge",)),
}
_LOOK, _TWO = "look_at_obj_in_light", "pick_two_obj_and_place"


@dataclass
class Generated:
    """What was made.

    made: games by split. by_type: games by type. earlier: those of them that were there already. unsolvable: games
    thrown away now. seconds: time it took now.
    """

    made: Counter[str] = field(default_factory=Counter)
    by_type: Counter[str] = field(default_factory=Counter)
    earlier: int = 0
    unsolvable: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Combination:
    """What a game is about. target: kind of the receptacle or, for look_at_obj_in_light, of the lamp."""

    task_type: str
    thing: str
    target: str
    room: int

    @property
    def folder(self) -> str:
        return f"{self.task_type}-{self.thing}-None-{self.target}-{self.room}"

    @classmethod
    def of_folder(cls, name: str) -> Combination:
        """The inverse of `folder`."""
        task_type, thing, _, target, room = name.split("-")
        return cls(task_type, thing, target, int(room))


def generate_games(
    out: str | os.PathLike[str],
    count: int,
    seed: int = 0,
    *,
    eval_share: float = 0.1,
    task_types: Sequence[str] = TASK_TYPES,
    progress: bool = False,
) -> Generated:
    """Write `count` games into a folder, which can then be an environment's `data`.

    The files depend on the other arguments only, byte for byte; the first games are the same for any larger count with
    the same numbers of evaluation games. A game's folder appears when it is complete, and a generation that was broken
    off goes on where it was.

    eval_share: share of the games in each of `valid_seen` and `valid_unseen`; rounded, and at least one each.
    task_types: taken in turn.
    progress: whether to show a progress bar.

    Raises ValueError when an argument is out of its range or `out` holds anything but games of the same arguments,
    ImportError without the alfworld package, and RuntimeError where combinations run out.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 3:
        raise ValueError(f"count must be an integer of at least 3, one game for each split; got {count!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer; got {seed!r}")
    if not 0 < eval_share < 0.5:
        raise ValueError(f"eval_share must be above 0 and below 0.5; got {eval_share!r}")
    if isinstance(task_types, str) or not task_types or not set(task_types) <= set(TASK_TYPES):
        raise ValueError(f"task_types must be some of {', '.join(TASK_TYPES)}; got {task_types!r}")
    check_installed()
    each = max(round(count * eval_share), 1)
    kinds = [kind for kind in TASK_TYPES if kind in task_types]
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"out must be a new or an empty folder, or one with generated games; {str(folder)!r} is a file"
        )
    with FolderLock(folder):
        there = _open_folder(folder, {"seed": seed, "evaluation_games": each, "task_types": kinds})
        splits = ["valid_seen"] * each + ["valid_unseen"] * each + ["train"] * (count - 2 * each)
        started = time.monotonic()
        result, used = Generated(), set(there.values())
        with tqdm(total=count, desc="generating games", unit="game", disable=not progress) as bar:
            for number, split in enumerate(splits):
                kind = kinds[number % len(kinds)]
                if number in there:
                    result.earlier += 1
                else:
                    rng = random.Random(f"rspo alfworld {seed} {number}")
                    made = _make(rng, split == "valid_unseen", kind, used, result)
                    _write(folder / split / made.combination.folder, f"{TRIAL}{number:06d}", made)
                result.made[split] += 1
                result.by_type[kind] += 1
                bar.update()
    result.seconds = time.monotonic() - started
    return result


def _open_folder(folder: Path, settings: dict[str, Any]) -> dict[int, Combination]:
    """The games that are there already, by number; a new folder is made.

    Raises ValueError where the folder is none of such a generation.
    """
    file = folder / SETTINGS_FILE
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before != settings:
            raise ValueError(f"out holds games of other settings: {str(folder)!r} has {before}, not {settings}")
        for part in folder.glob(f"*/*/{PART}*"):
            shutil.rmtree(part)
        trials = folder.glob(f"*/*/{TRIAL}*")
        return {int(path.name.removeprefix(TRIAL)): Combination.of_folder(path.parent.name) for path in trials}
    if folder.exists() and any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise ValueError(
            f"out must be a new or an empty folder, or one with generated games; {str(folder)!r} has something else in"
            f" it, and no {SETTINGS_FILE}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(settings))
    return {}


@dataclass(frozen=True)
class _Made:
    combination: Combination
    game: dict[str, Any]


def _make(rng: random.Random, unseen: bool, task_type: str, used: set[Combination], result: Generated) -> _Made:
    """A game that can be won."""
    for _ in range(ATTEMPTS):
        combination = _choose(rng, room_numbers(unseen), task_type)
        if combination is None or combination in used:
            continue
        room = load_room(combination.room)
        furnished = furnish(
            room,
            rng,
            at_least={combination.thing: 2 if task_type == _TWO else 1},
            not_in={} if task_type == _LOOK else {combination.thing: combination.target},
        )
        if furnished is None:
            continue
        game = _game_file(combination, furnished, rng)
        walkthrough = _walkthrough(game)
        if walkthrough is None:
            result.unsolvable += 1
            continue
        used.add(combination)
        return _Made(combination, {**game, "solvable": True, "walkthrough": walkthrough})
    raise RuntimeError(f"no new combination for a game of type {task_type} in {ATTEMPTS} attempts; make fewer games")


def _choose(rng: random.Random, rooms: Sequence[int], task_type: str) -> Combination | None:
    """A combination of the type in a random room; None where the room has none."""
    valid: set[str] = alfworld("gen.constants").GOALS_VALID[task_type]
    room = load_room(rng.choice([number for number in rooms if load_room(number).kind in valid]))
    things, targets = list(room.things), list(room.receptacle_kinds)
    if task_type == _LOOK:
        targets = [kind for kind in room.fixtures if kind == "DeskLamp"]
    elif task_type in _CONDITIONS:
        affordance, tools = _CONDITIONS[task_type]
        if not set(tools) & set(targets):
            return None
        things = [kind for kind in things if kind in can_be(affordance)]
        targets = [kind for kind in targets if kind not in tools]
    pairs = [
        (thing, target) for thing in things for target in targets if task_type == _LOOK or thing in holds()[target]
    ]
    return Combination(task_type, *rng.choice(pairs), room.number) if pairs else None


def _walkthrough(game: dict[str, Any]) -> list[str] | None:
    """The commands that win a game; None where it cannot be won."""
    problem = game["pddl_problem"]
    file = GameFile(Path("generated"), game["pddl_domain"], game["grammar"], problem, read_goal(problem), True)
    try:
        played = FastGame.of(file)
    except GameError:
        return None
    commands: list[str] = []
    return commands if not played.won and win_directly(played, commands) else None


def _game_file(combination: Combination, furnished: Furnished, rng: random.Random) -> dict[str, Any]:
    info, library = alfworld("info"), alfworld("gen.goal_library").gdict[combination.task_type]
    names = {
        "obj": combination.thing,
        "recep": combination.target,
        "toggle": combination.target,
    }
    text = rng.choice(library["templates"]).format(**{key: name.lower() for key, name in names.items()})
    grammar = Path(info.ALFRED_TWL2_PATH).read_text(encoding="utf-8").replace("UNKNOWN GOAL", text)
    goal = library["pddl"].format(**names).replace("#", "-")
    return {
        "pddl_domain": Path(info.ALFRED_PDDL_PATH).read_text(encoding="utf-8"),
        "grammar": grammar,
        "pddl_problem": _problem(furnished, goal),
    }


def _problem(furnished: Furnished, goal: str) -> str:
    """The PDDL of a furnished room. `goal` closes the definition."""
    room, things = furnished.room, furnished.things
    kinds = sorted({thing.kind for thing in things})
    locations = sorted({place.location for place in room.receptacles} | {thing.location for thing in things})
    objects = [
        "agent1 - agent",
        *(f"{kind}Type - otype" for kind in kinds),
        *(f"{kind}Type - rtype" for kind in room.receptacle_kinds),
        *(f"{thing.name} - object" for thing in things),
        *(f"{place.name} - receptacle" for place in room.receptacles),
        *(f"{location} - location" for location in [furnished.start, *locations]),
    ]
    facts = [f"atLocation agent1 {furnished.start}"]
    for place in room.receptacles:
        facts += [
            f"receptacleType {place.name} {place.kind}Type",
            f"receptacleAtLocation {place.name} {place.location}",
        ]
        facts += [f"openable {place.name}"] if place.openable else []
    for kind in room.receptacle_kinds:
        facts += [f"canContain {kind}Type {thing}Type" for thing in sorted(holds()[kind] & set(kinds))]
    for thing in things:
        facts += [f"objectType {thing.name} {thing.kind}Type", f"objectAtLocation {thing.name} {thing.location}"]
        facts += [f"inReceptacle {thing.name} {thing.place.name}"] if thing.place is not None else []
        facts += [f"pickupable {thing.name}"] if thing.portable else []
        facts += [f"isReceptacleObject {thing.name}"] if thing.kind in movable_receptacles() else []
        for affordance in ("Cleanable", "Heatable", "Coolable", "Sliceable", "Toggleable"):
            facts += [f"{affordance.lower()} {thing.name}"] if thing.kind in can_be(affordance) else []
    lines = ["(define (problem generated)", "(:domain alfred)", "(:objects", *objects, ")", "(:init"]
    return "\n".join([*lines, *(f"({fact})" for fact in facts), ")", goal.strip(), ""])


def _write(folder: Path, trial: str, made: _Made) -> None:
    """Write a game so that its folder is there only when it is complete."""
    looks = made.combination.task_type == _LOOK
    trajectory = {
        "task_type": made.combination.task_type,
        "task_id": trial,
        "pddl_params": {
            "object_target": made.combination.thing,
            "parent_target": "" if looks else made.combination.target,
            "toggle_target": made.combination.target if looks else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "turk_annotations": {"anns": []},
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=PART, dir=folder))
    try:
        (part / GAME_FILE).write_text(json.dumps(made.game), encoding="utf-8")
        (part / "traj_data.json").write_text(json.dumps(trajectory, indent=1), encoding="utf-8")
        part.chmod(0o755)
        part.rename(folder / trial)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise

"""Game files: where they are, what they hold, what their goal is.

A data folder is one of

- ALFWorld's own (`ALFWORLD_DATA`), with `json_2.1.1/<split>/...` in it,
- a folder with the split folders in it: `train`, `valid_seen`, `valid_unseen` (or `valid_train` in place of `train`),
- a folder that holds games and no split folders: every split is then all of them.

A game is a file `game.tw-pddl`, two folders below its split:
`<type>-<object>-<movable>-<receptacle>-<scene>/<trial>/`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .upstream import GameError

logger = logging.getLogger(__name__)

DATA_VARIABLE = "ALFWORLD_DATA"
GAME_FILE = "game.tw-pddl"
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLIT_FOLDERS = {
    "train": ("train", "valid_train"),
    "eval_in_distribution": ("valid_seen",),
    "eval_out_of_distribution": ("valid_unseen",),
}
"""The folders that a split may be in, the first that is there."""

HOW_TO_GET_DATA = (
    f"set {DATA_VARIABLE} or the argument data to a folder with games; `alfworld-download` fetches the official ones on"
    " a machine with internet access, `rspo envs alfworld generate --out DIR` makes games without any download"
)


@dataclass(frozen=True)
class AlfworldTask:
    """A game.

    game: path of the folder with its game file, from the data folder.
    task_type: one of TASK_TYPES.
    """

    game: str
    task_type: str


@dataclass(frozen=True)
class Goal:
    """What wins a game, in the lower-case names of its facts.

    object_type, receptacle_type, lamp_type: e.g. "mugtype"; there is a lamp in place of a receptacle for
        look_at_obj_in_light.
    condition: the predicate that the object must have ("isclean", "ishot", "iscool"), or None.
    """

    task_type: str
    object_type: str
    receptacle_type: str | None = None
    lamp_type: str | None = None
    condition: str | None = None


@dataclass(frozen=True)
class GameFile:
    """What a game file holds."""

    path: Path
    domain: str
    grammar: str
    problem: str
    goal: Goal
    is_solvable: bool


def read_game(path: Path) -> GameFile:
    """A game file. Raises GameError, which names the file, where it is none or its goal is of none of the types."""
    try:
        data: Any = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise GameError("it is not a JSON object")
        texts = [data.get(key) for key in ("pddl_domain", "grammar", "pddl_problem")]
        if not all(isinstance(text, str) for text in texts):
            raise GameError("pddl_domain, grammar and pddl_problem must be texts")
        domain, grammar, problem = map(str, texts)
        return GameFile(path, domain, grammar, problem, read_goal(problem), data.get("solvable") is True)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError, GameError) as error:
        raise GameError(f"{path} is not a game that can be played: {error}") from error


_TYPED = re.compile(r"\((object|receptacle)type\s+\?(\w+)\s+(\w+)\s*\)")
_CONDITIONS = {
    "isclean": "pick_clean_then_place_in_recep",
    "ishot": "pick_heat_then_place_in_recep",
    "iscool": "pick_cool_then_place_in_recep",
}


def read_goal(problem: str) -> Goal:
    """The goal of a PDDL problem. Raises GameError where it is of none of the six types."""
    text = problem.lower().partition("(:goal")[2]
    objects = [(name, type_) for kind, name, type_ in _TYPED.findall(text) if kind == "object"]
    receptacles = {type_ for kind, _, type_ in _TYPED.findall(text) if kind == "receptacle"}
    conditions = [condition for condition in _CONDITIONS if f"({condition} " in text]
    unknown = "(issliced " in text or "(inreceptacleobject " in text
    if "(istoggled " in text and len(objects) == 2 and not receptacles and not conditions and not unknown:
        lamp = re.search(r"\(istoggled\s+\?(\w+)", text)
        lamps = [type_ for name, type_ in objects if lamp is not None and name == lamp.group(1)]
        held = [type_ for name, type_ in objects if lamp is not None and name != lamp.group(1)]
        if lamps and held and "(holds " in text:
            return Goal("look_at_obj_in_light", held[0], lamp_type=lamps[0])
    elif len(receptacles) == 1 and "(inreceptacle " in text and not unknown and "(istoggled " not in text:
        (receptacle,) = receptacles
        types = {type_ for _, type_ in objects}
        if len(objects) == 1 and len(conditions) <= 1:
            condition = conditions[0] if conditions else None
            task_type = _CONDITIONS[condition] if condition else "pick_and_place_simple"
            return Goal(task_type, objects[0][1], receptacle, condition=condition)
        if len(objects) == 2 and len(types) == 1 and not conditions:
            return Goal("pick_two_obj_and_place", types.pop(), receptacle)
    raise GameError(f"its goal is of none of the types {', '.join(TASK_TYPES)}")


def find_root(data: str | os.PathLike[str] | None) -> Path:
    """The folder that holds the splits.

    data: a data folder, as the module's docstring says; None for the one that ALFWORLD_DATA names.

    Raises ValueError that says what to do where there is none.
    """
    named = "data" if data is not None else DATA_VARIABLE
    place = data if data is not None else os.environ.get(DATA_VARIABLE)
    if not place:
        raise ValueError(f"there are no ALFWorld games to play; {HOW_TO_GET_DATA}")
    root = Path(os.path.expandvars(os.path.expanduser(place))).absolute()
    if not root.is_dir():
        raise ValueError(f"{named} must be a folder with ALFWorld games, but {str(root)!r} is none; {HOW_TO_GET_DATA}")
    for folder in (root / "json_2.1.1", root):
        if any((folder / name).is_dir() for names in SPLIT_FOLDERS.values() for name in names):
            return folder
    if next(root.rglob(GAME_FILE), None) is None:
        known = ", ".join(name for names in SPLIT_FOLDERS.values() for name in names)
        raise ValueError(
            f"{named} must be a folder with ALFWorld games, but {str(root)!r} has none of the folders {known} and no"
            f" {GAME_FILE}; {HOW_TO_GET_DATA}"
        )
    return root


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split. Raises ValueError where it is not there."""
    there = [root / name for names in SPLIT_FOLDERS.values() for name in names if (root / name).is_dir()]
    if not there:
        return root  # games without splits
    for name in SPLIT_FOLDERS[split]:
        if (root / name).is_dir():
            return root / name
    raise ValueError(
        f"split {split!r} must be in the folder {' or '.join(SPLIT_FOLDERS[split])} of {str(root)!r}, which has"
        f" {', '.join(folder.name for folder in there)}; {HOW_TO_GET_DATA}"
    )


@dataclass(frozen=True)
class Games:
    """The games of a split.

    tasks: those that can be played, sorted by folder.
    broken: number of files that are no games.
    """

    tasks: tuple[AlfworldTask, ...]
    broken: int


def find_games(root: Path, split: str, task_types: Sequence[str] = TASK_TYPES) -> Games:
    """The games of a split, and of these types.

    A file that cannot be read is warned of and counted. Left out without a word are, as in the alfworld package, games
    that are not marked solvable and those with sliced objects or movable receptacles.

    Raises ValueError where the split is not there or no game is left.
    """
    folder = split_folder(root, split)
    tasks, broken = [], 0
    for path in _game_files(folder):
        try:
            game = read_game(path)
        except GameError as error:
            logger.warning("skipped: %s", error)
            broken += 1
            continue
        if game.is_solvable and game.goal.task_type in task_types:
            tasks.append(AlfworldTask(path.parent.relative_to(root).as_posix(), game.goal.task_type))
    if not tasks:
        raise ValueError(
            f"{str(folder)!r} has no game of the types {', '.join(task_types)} that can be played"
            f" ({broken} broken files were skipped); {HOW_TO_GET_DATA}"
        )
    return Games(tuple(tasks), broken)


def _game_files(folder: Path) -> Iterable[Path]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]  # games that are being made
        within = os.path.relpath(place, folder)
        if GAME_FILE in files and "movable" not in within and "Sliced" not in within:
            found.append(Path(place) / GAME_FILE)
    return sorted(found)

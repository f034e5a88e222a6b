"""Games for the tests of the ALFWorld environment: generated ones, and official ones where they are there."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmark_data import data_folder

from rspo.envs.alfworld.games import TASK_TYPES, AlfworldTask

needs_alfworld = pytest.mark.skipif(
    find_spec("alfworld") is None or find_spec("textworld") is None, reason="needs pip install 'rspo[alfworld]'"
)
OLD_GRAMMAR = (
    ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
    ('"move {o} to {r}"', '"put {o} in/on {r}"'),
    ("You arrive at {r.name}.", "You arrive at {lend.name}."),
    ("move (object) to (receptacle): ", "put (object) in/on (receptacle): "),
)
"""What games said before alfworld 0.4 in place of what they say since."""
SEED = 7
COUNT = 14


@lru_cache(maxsize=1)
def generated_games(base: Path) -> Path:
    """A data folder of COUNT generated games, made once in a test session; `base` is pytest's temporary folder."""
    from rspo.envs.alfworld.generator import generate_games

    folder = base / f"alfworld_generated_{os.getpid()}"
    generate_games(folder, COUNT, SEED, eval_share=0.07)
    return folder


@lru_cache(maxsize=1)
def unpacked_games(base: Path, archive: Path) -> Path:
    """The official games of the test data, unpacked once in a test session."""
    folder = base / f"alfworld_official_{os.getpid()}"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


@lru_cache(maxsize=2)
def in_old_grammar(folder: Path) -> Path:
    """The same games as alfworld gave them out before 0.4, in a folder beside."""
    old = folder.with_name(f"{folder.name}_old_grammar")
    shutil.copytree(folder, old)
    for path in old.rglob("game.tw-pddl"):
        game = json.loads(path.read_text(encoding="utf-8"))
        for new_text, old_text in OLD_GRAMMAR:
            assert new_text in game["grammar"]
            game["grammar"] = game["grammar"].replace(new_text, old_text)
        path.write_text(json.dumps(game), encoding="utf-8")
    return old


def official_games(base: Path) -> Path:
    """As `unpacked_games`; skips where there are none."""
    return unpacked_games(base, data_folder("alfworld") / "alfworld_games.tar.xz")


def one_of_each_type(tasks: tuple[AlfworldTask, ...], skip: int = 0) -> list[AlfworldTask]:
    """The first task of each type, after some."""
    return [[task for task in tasks if task.task_type == kind][skip] for kind in TASK_TYPES]


def play(env: Any, tasks: list[AlfworldTask], seeds: list[int], choose: Any, turns: int) -> list[list[tuple[Any, ...]]]:
    """What each episode shows when `choose(env, observations, infos, turn)` plays them."""
    observations, infos = env.reset(tasks, seeds)
    shown: list[list[tuple[Any, ...]]] = [[pair] for pair in zip(observations, infos, strict=True)]
    for turn in range(turns):
        step = env.step(choose(env, observations, infos, turn))
        observations, infos = step[0], step[4]
        for rows, *row in zip(shown, step[0], *(part.tolist() for part in step[1:4]), step[4], strict=True):
            rows.append(tuple(row))
    return shown

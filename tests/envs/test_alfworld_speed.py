"""The fast layer shows exactly what TextWorld's environment shows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from alfworld_games import generated_games, in_old_grammar, needs_alfworld, official_games, one_of_each_type

from rspo.envs.alfworld import AlfworldEnv
from rspo.envs.alfworld.direct_way import direct_command
from rspo.envs.alfworld.games import TASK_TYPES
from rspo.envs.alfworld.plain import PlainGame
from rspo.envs.alfworld.speed import FastGame
from rspo.envs.alfworld.upstream import GameError

pytestmark = needs_alfworld
INVALID = ("", "help me", "go to nowhere 1", "GO TO cabinet 1", "take desk 1 from desk 1")


def seen(game: FastGame | PlainGame) -> tuple[Any, ...]:
    return game.observation, game.commands, game.won, game.goal, sorted(game.facts())


def compare(path: Path, wandering: int) -> int:
    """Play both games alike: some turns at random, commands with spaces around them and invalid ones among them, and
    then directly to the goal. The number of turns."""
    fast, plain, rng = FastGame(path), PlainGame(path), random.Random(str(path.parent.name))
    assert seen(fast) == seen(plain)
    turns = 0
    while not fast.won and turns < 40:
        near = [command for command in fast.commands if not command.startswith("go to")]
        wanted = direct_command(fast)
        if turns < wandering:
            command = rng.choice([rng.choice(fast.commands), f" {rng.choice(near)} ", rng.choice(INVALID)])
        else:
            assert wanted is not None
            command = wanted
        assert fast.act(command) == plain.act(command)
        assert seen(fast) == seen(plain), command
        turns += 1
    assert fast.won
    return turns


@pytest.mark.parametrize("kind", TASK_TYPES)
def test_official_games_are_shown_as_by_textworld(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = official_games(tmp_path_factory.getbasetemp())
    task = one_of_each_type(AlfworldEnv(root).tasks("eval"), skip=2)[TASK_TYPES.index(kind)]
    assert compare(root / task.game / "game.tw-pddl", wandering=5) > 7


@pytest.mark.parametrize("kind", ["look_at_obj_in_light", "pick_cool_then_place_in_recep"])
def test_generated_games_are_shown_as_by_textworld(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = generated_games(tmp_path_factory.getbasetemp())
    (task,) = AlfworldEnv(root, task_types=[kind]).tasks()[:1]
    wandering = 15 if kind == "look_at_obj_in_light" else 0
    assert compare(root / task.game / "game.tw-pddl", wandering) > wandering


def test_games_of_the_old_grammar_are_shown_as_by_textworld(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = in_old_grammar(generated_games(tmp_path_factory.getbasetemp()))
    (task,) = AlfworldEnv(root, task_types=["pick_and_place_simple"]).tasks()[:1]
    assert compare(root / task.game / "game.tw-pddl", wandering=5) > 5


def test_an_environment_shows_the_same_with_and_without_the_layer(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = generated_games(tmp_path_factory.getbasetemp())
    envs = [AlfworldEnv(root, fast=fast) for fast in (True, False)]
    task = next(task for task in envs[0].tasks() if task.task_type == "look_at_obj_in_light")
    shown = [[env.reset([task], [3])] for env in envs]
    for turn in range(5):
        actions = [env.expert_actions() if turn % 2 else ["look"] for env in envs]
        assert actions[0] == actions[1]
        for rows, env, action in zip(shown, envs, actions, strict=True):
            step = env.step(action)
            rows.append((*step[:1], step[4]))
    assert shown[0] == shown[1]
    states = [env.snapshot() for env in envs]
    after = [env.step(["inventory"])[0] for env in envs]
    again = [(env.restore(state), env.step(["inventory"])[0]) for env, state in zip(envs, states, strict=True)]
    assert again[0] == again[1]
    assert after == [step for _, step in again]


def test_games_that_share_what_is_loaded_do_not_disturb_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = generated_games(tmp_path_factory.getbasetemp())
    path = root / AlfworldEnv(root).tasks()[0].game / "game.tw-pddl"
    first, second = FastGame(path), FastGame(path)
    start = seen(first)
    first.act(first.commands[0])
    assert seen(second) == start
    moved = seen(first)
    copy = first.copy()
    first.act(first.commands[-1])
    second.act(second.commands[1])
    assert seen(copy) == moved
    assert seen(FastGame(path)) == start
    copy.act(copy.commands[-1])
    assert seen(copy) == seen(first)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("{o.name}", "{__import__('os').getcwd()}"), "expression that is not allowed"),
        (("{o.name}", "{o.__class__}"), "expression that is not allowed"),
        (("{o.name}", "{o.name +}"), "malformed expression"),
        (('"inventory.feedback": [', '"inventory.feedback": ['[:-1]), "cannot be parsed"),
    ],
)
def test_what_a_grammar_may_not_do(
    fast: bool, change: tuple[str, str], said: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """TextWorld evaluates the expressions of a game file as Python."""
    root = generated_games(tmp_path_factory.getbasetemp())
    data = json.loads((root / AlfworldEnv(root).tasks()[0].game / "game.tw-pddl").read_text())
    assert change[0] in data["grammar"]
    data["grammar"] = data["grammar"].replace(*change)
    path = tmp_path / "game.tw-pddl"
    path.write_text(json.dumps(data))
    with pytest.raises(GameError, match=f"{path} is not a game that can be played.*{said}"):
        (FastGame if fast else PlainGame)(path)

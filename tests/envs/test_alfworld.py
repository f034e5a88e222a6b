"""The ALFWorld environment: contract, prompts, dense reward, expert, snapshots, workers, what it says when it fails."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alfworld_games import generated_games, in_old_grammar, needs_alfworld, official_games, one_of_each_type, play

from rspo.envs import PromptContext, make_env
from rspo.envs.alfworld import AlfworldEnv
from rspo.envs.alfworld.games import AlfworldTask
from rspo.envs.workers import WorkerEnv

pytestmark = needs_alfworld
INFO_KEYS = {
    "task", "task_type", "anchor", "admissible_actions", "is_action_valid", "won", "task_score", "dense_reward",
    "lost_worker",
}  # fmt: skip
VERBS = ("go to", "take", "move", "open", "close", "examine", "use", "clean", "heat", "cool", "slice")


@pytest.fixture
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_games(tmp_path_factory.getbasetemp())


@pytest.fixture
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return official_games(tmp_path_factory.getbasetemp())


@pytest.fixture
def old_games(games: Path) -> Path:
    return in_old_grammar(games)


@pytest.fixture(params=["move to", "put in/on"])
def either(request: pytest.FixtureRequest, games: Path) -> Path:
    """Games of each grammar."""
    return in_old_grammar(games) if request.param == "put in/on" else games


def choose(env: Any, observations: list[str], infos: list[dict[str, Any]], turn: int) -> list[str]:
    """Actions that depend on nothing but what each episode shows; some are invalid."""
    actions = []
    for observation, info in zip(observations, infos, strict=True):
        number, admissible = zlib.crc32(f"{turn} {observation}".encode()), info["admissible_actions"]
        actions.append("go nowhere" if number % 5 == 0 or not admissible else admissible[number % len(admissible)])
    return actions


def expert(env: AlfworldEnv, *_: Any) -> list[str]:
    return env.expert_actions()


# Contract


@pytest.mark.parametrize("style", ["chat", "compact"])
def test_infos_have_the_keys_and_types_of_the_contract(games: Path, style: str) -> None:
    env = make_env("alfworld", data=games, prompt_style=style)
    assert isinstance(env, AlfworldEnv)
    assert (env.max_turns, env.has_dense_reward, env.has_snapshots) == (50, True, True)
    tasks = one_of_each_type(env.tasks())
    shown = play(env, tasks, [0] * 6, choose, 2)
    for task, rows in zip(tasks, shown, strict=True):
        for row in rows:
            observation, info = row[0], row[-1]
            assert set(info) == INFO_KEYS
            assert info["task_type"] == task.task_type
            assert info["anchor"] == observation
            assert info["admissible_actions"]
            assert not {"help"} & set(info["admissible_actions"])
            assert all(action.startswith((*VERBS, "look", "inventory")) for action in info["admissible_actions"])
            assert (info["won"], info["task_score"], info["lost_worker"]) == (False, 0.0, False)
            assert all(type(info[key]) is float for key in ("task_score", "dense_reward"))
        first, info = rows[0]
        assert first.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
        assert "Your task" not in first
        assert "Welcome" not in first
        assert info["task"].endswith(".")
        assert not info["task"].startswith("Your")


def test_an_invalid_action_changes_nothing_and_is_said_to_be_invalid(games: Path) -> None:
    env = AlfworldEnv(games)
    _, (before,) = env.reset(env.tasks()[:1], [0])
    for action, answer in (
        ("eat the desk", "Nothing happens."),
        ("help", "Available commands:"),
        ("", "Nothing happens."),
    ):
        (observation,), rewards, terminated, truncated, (info,) = env.step([action])
        assert answer in observation
        assert (info["is_action_valid"], rewards[0], terminated[0], truncated[0]) == (False, 0.0, False, False)
        assert info["admissible_actions"] == before["admissible_actions"]
        assert info["dense_reward"] == 0.0
    assert env.step([before["admissible_actions"][0]])[4][0]["is_action_valid"]


def test_episodes_are_cut_off_at_the_turn_limit(games: Path) -> None:
    env = AlfworldEnv(games, max_turns=2)
    env.reset(env.tasks()[:1], [0])
    assert env.step(["look"])[3].tolist() == [False]
    _, _, terminated, truncated, infos = env.step(["look"])
    assert (terminated.tolist(), truncated.tolist(), infos[0]["admissible_actions"]) == ([False], [True], [])


def test_an_episode_does_not_depend_on_the_batch(games: Path) -> None:
    env = AlfworldEnv(games, max_turns=12)
    tasks = [*one_of_each_type(env.tasks())[:3], env.tasks()[0], env.tasks()[0]]
    seeds = [0, 1, 2, 3, 3]
    together = play(env, tasks, seeds, choose, 12)
    assert together[3] == together[4]
    backwards = play(AlfworldEnv(games, max_turns=12), tasks[::-1], seeds[::-1], choose, 12)[::-1]
    alone = [play(env, [task], [seed], choose, 12)[0] for task, seed in zip(tasks, seeds, strict=True)]
    assert together == backwards == alone


# Expert and dense reward


def test_the_expert_wins_every_type_and_the_dense_reward_adds_up(either: Path) -> None:
    env = AlfworldEnv(either, max_turns=60, outcome_scale=7.0)
    tasks = one_of_each_type(env.tasks())
    for rows in play(env, tasks, [5] * 6, expert, 60):
        steps = rows[1:]
        end = next(i for i, row in enumerate(steps) if row[2])
        dense = [row[-1]["dense_reward"] for row in steps]
        assert [row[1] for row in steps] == [0.0] * end + [7.0] + [0.0] * (59 - end)
        assert (steps[end][-1]["won"], steps[end][-1]["task_score"]) == (True, 1.0)
        assert sum(dense) == pytest.approx(1.0)
        assert min(dense) >= 0
        assert dense[end] > 0
        assert not any(dense[end + 1 :])
        assert sum(value > 0 for value in dense) >= 2, "it comes in parts"


def test_the_dense_reward_cannot_be_earned_twice(either: Path) -> None:
    env = AlfworldEnv(either)
    task = next(task for task in env.tasks() if task.task_type == "pick_and_place_simple")
    env.reset([task], [0])
    while not (action := env.expert_actions()[0]).startswith("take"):
        env.step([action])
    info = env.step([action])[4][0]
    assert info["dense_reward"] == 0.5
    _, thing, place = action.replace("take ", "|").replace(" from ", "|").split("|")
    for _ in range(2):
        for verb in (("move ", "put "), ("take ",)):
            (again,) = [a for a in info["admissible_actions"] if a.startswith(verb) and thing in a and place in a]
            info = env.step([again])[4][0]
            assert info["is_action_valid"]
            assert info["dense_reward"] == 0.0


def test_the_expert_acts_from_any_state(either: Path) -> None:
    """After turns at random, with things in hand that are not wanted."""
    env = AlfworldEnv(either, max_turns=100)
    tasks = one_of_each_type(env.tasks())

    def astray(env: AlfworldEnv, observations: list[str], infos: list[dict[str, Any]], turn: int) -> list[str]:
        taking = [[a for a in info["admissible_actions"] if a.startswith("take")] for info in infos]
        random = choose(env, observations, infos, turn)
        wandering = [options[0] if options else action for options, action in zip(taking, random, strict=True)]
        return wandering if turn < 25 else env.expert_actions()

    shown = play(env, tasks, [1] * 6, astray, 100)
    assert [rows[-1][-1]["won"] for rows in shown] == [True] * 6
    assert shown == play(env, tasks, [1] * 6, astray, 100), "the same again: its choices follow from the seed"


def test_the_expert_wins_official_games(official: Path) -> None:
    env = AlfworldEnv(official, max_turns=50)
    assert (len(env.tasks()), len(env.tasks("eval")), env.skipped_tasks) == (200, 140, 0)
    assert env.tasks("eval") == env.tasks("eval_in_distribution")
    tasks = [task for n in (0, 4) for task in one_of_each_type(env.tasks("eval"), skip=n)]
    shown = play(env, tasks, list(range(12)), expert, 50)
    assert sum(rows[-1][-1]["won"] for rows in shown) >= 11
    for rows in shown:
        earned = sum(row[-1]["dense_reward"] for row in rows[1:])
        assert earned == pytest.approx(1.0) if rows[-1][-1]["won"] else earned < 1
    with pytest.raises(ValueError, match="'eval_out_of_distribution' must be in the folder valid_unseen of"):
        env.tasks("eval_out_of_distribution")


def test_the_expert_does_the_same_in_either_grammar(games: Path) -> None:
    """Command for command, so that it wins official games as often in the old one as in the new one."""
    done: list[list[list[str]]] = []
    for folder in (games, in_old_grammar(games)):
        env = AlfworldEnv(folder)
        env.reset(one_of_each_type(env.tasks()), [3] * 6)
        done.append([])
        for _ in range(50):
            actions = env.expert_actions()
            done[-1].append(actions)
            env.step(actions)
    new, old = (np.array(actions).T for actions in done)
    assert [re.sub("put (.+) in/on", r"move \1 to", action) for action in old.flat] == new.flatten().tolist()
    assert any(action.startswith("put ") for action in old.flat)


def test_the_expert_wins_official_games_of_the_old_grammar(official: Path, tmp_path: Path) -> None:
    tasks = one_of_each_type(AlfworldEnv(official).tasks("eval"), skip=1)
    for task in tasks:
        shutil.copytree(official / task.game, tmp_path / "games" / task.game)
    env = AlfworldEnv(in_old_grammar(tmp_path / "games"))
    shown = play(env, tasks, [0] * 6, expert, 50)
    assert [rows[-1][-1]["won"] for rows in shown] == [True] * 6


# Prompts


def test_chat_prompts(games: Path) -> None:
    env = AlfworldEnv(games)
    (observation,), (info,) = env.reset(env.tasks()[:1], [0])
    context = PromptContext(info["task"], (), observation, tuple(info["admissible_actions"]), 0)
    prompt = env.render_prompt(context)
    offered = "".join(f"\n'{action}'" for action in info["admissible_actions"])
    for part in (info["task"], observation, f"Actions you can choose from:{offered}\n", "<think>", "<action>"):
        assert part in prompt
    assert observation in env.render_reply(context)
    assert f"Actions you can choose from:{offered}\n" in env.render_reply(context)
    action = info["admissible_actions"][0]
    assert env.project(f"<think>hm</think><action>{action.upper()}</action>") == (action, True)
    assert env.project("go somewhere") == ("go somewhere", False)
    for written in (f"{action}.", f"'{action}'", f"'{action}.'", f'"{action}".', f" `{action}` . "):
        projected, well_formed = env.project(f"<think>hm</think><action>{written}</action>")
        assert (projected, well_formed) == (action, True)
        env.reset(env.tasks()[:1], [0])
        assert env.step([projected])[4][0]["is_action_valid"]
    assert env.project("<think>hm</think><action>.</action>") == ("", False)
    assert env.project(env.render_action(action)) == (action, True)


@pytest.mark.parametrize("source", ["games", "old_games", "official"])
def test_compact_prompts_are_short_and_hold_known_words_only(source: str, request: pytest.FixtureRequest) -> None:
    env = AlfworldEnv(request.getfixturevalue(source), prompt_style="compact", max_turns=25)
    known, lengths = set(env.vocabulary()), []
    assert list(env.vocabulary()) == sorted(known)
    shown = play(env, one_of_each_type(env.tasks()), [0] * 6, expert, 12)
    shown += play(env, one_of_each_type(env.tasks())[:3], [0] * 3, choose, 25)
    for rows in shown:
        for turn in range(len(rows)):
            info, observation = rows[turn][-1], rows[turn][0]
            past = tuple((rows[i][0], "go to mugg 1") for i in range(max(turn - 2, 0), turn))
            context = PromptContext(info["task"], past, observation, tuple(info["admissible_actions"]), turn)
            words = env.render_prompt(context).split(" ")
            assert set(words) <= known
            assert ("unknown" in words) == (turn > 0)
            assert set(env.render_reply(context).split(" ")) <= known
            for action in info["admissible_actions"]:
                assert set(action.split()) <= known
                assert env.project(env.render_action(action)) == (action, True)
            lengths.append(len(words))
    assert np.mean(lengths) < 160
    assert max(lengths) < 300


def test_a_compact_prompt() -> None:
    env_prompt = AlfworldEnv.compact_prompt
    room = "You are in the middle of a room. Looking quickly around you, you see a desk 2, a desk 1, and a bed 1."
    actions = (
        "examine bed 1",
        "go to desk 1",
        "go to desk 10",
        "go to desk 2",
        "inventory",
        "look",
        "take mug 2 from bed 1",
    )
    start = PromptContext("put a clean mug in desk.", (), room, ("go to bed 1", "go to desk 2", "look"), 0)
    assert env_prompt(None, start) == (  # type: ignore[arg-type]
        "task : put a clean mug in desk . now you are in the middle of a room . "
        "actions : go to : bed 1 , desk 2 ; look ; do :"
    )
    later = PromptContext(
        "put a clean mug in desk.",
        ((room, "go to bed 1"), ("You arrive at bed 1. On the bed 1, you see nothing.", "wave at nobody 1")),
        "On the bed 1, you see a mug 2, a book 1, and a mug 1.",
        actions,
        2,
    )
    assert env_prompt(None, later) == (  # type: ignore[arg-type]
        "task : put a clean mug in desk . then go to bed 1 : you arrive at bed 1 . on the bed 1 , you see nothing . "
        "then unknown at unknown 1 : on the bed 1 , you see book 1 , mug 1 2 . actions : examine : bed 1 ; "
        "go to : desk 1 2 10 ; inventory ; look ; take : mug 2 from bed 1 ; do :"
    )


# Snapshots and workers


def test_snapshots_go_back_and_on(games: Path) -> None:
    env = AlfworldEnv(games)
    tasks = one_of_each_type(env.tasks())[:3]
    whole = play(env, tasks, [0, 1, 2], expert, 20)
    env.reset(tasks, [0, 1, 2])
    for _ in range(6):
        env.step(env.expert_actions())
    state = env.snapshot()
    sent = pickle.dumps(state)
    for _ in range(4):
        env.step(choose(env, *env.restore(state), 0))
    for snapshot in (state, pickle.loads(sent)):
        observations, infos = env.restore(snapshot)
        assert [(o, i) for o, i in zip(observations, infos, strict=True)] == [(r[6][0], r[6][-1]) for r in whole]
        for turn in range(7, 21):
            step = env.step(env.expert_actions())
            assert (step[0], step[4]) == ([r[turn][0] for r in whole], [r[turn][-1] for r in whole])


def test_episodes_are_the_same_in_workers(games: Path) -> None:
    options = {"data": str(games), "max_turns": 8}
    inner = AlfworldEnv(**options)  # type: ignore[arg-type]
    tasks = one_of_each_type(inner.tasks())[:3]
    expected = play(inner, tasks, [0, 1, 2], choose, 8)
    with WorkerEnv("alfworld", options, workers=2) as env:
        assert env.tasks() == inner.tasks()
        assert play(env, tasks, [0, 1, 2], choose, 8) == expected
        observations, infos = env.reset(tasks, [0, 1, 2])
        state = env.snapshot()
        env.step(["look"] * 3)
        assert env.restore(state) == (observations, infos)


# Faults


def broken_copy(games: Path, folder: Path) -> list[Path]:
    """A data folder whose only folder of games is `train`, with the game files of its first ones to be spoilt."""
    for path in sorted((games / "train").rglob("game.tw-pddl")):
        target = folder / "train" / path.relative_to(games / "train")
        target.parent.mkdir(parents=True)
        target.write_bytes(path.read_bytes())
    return sorted((folder / "train").rglob("game.tw-pddl"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_files_that_are_no_games_are_skipped_and_counted(
    games: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = broken_copy(games, tmp_path)
    files[0].write_text("{")
    change(files[1], grammar=None)
    change(files[2], pddl_problem=json.loads(files[2].read_text())["pddl_problem"].partition("(:goal")[0])
    change(files[3], solvable=False)
    change(
        files[4], pddl_problem=json.loads(files[4].read_text())["pddl_problem"].replace("(and", "(and (isSliced ?o)")
    )
    env = AlfworldEnv(tmp_path)
    with caplog.at_level(logging.WARNING):
        tasks = env.tasks()
    assert [tmp_path / task.game / "game.tw-pddl" for task in tasks] == files[5:]
    assert env.skipped_tasks == 4
    assert [str(path) in message for path, message in zip([*files[:3], files[4]], caplog.messages, strict=True)] == [
        True
    ] * 4
    assert env.tasks() is tasks
    assert len(caplog.messages) == 4, "each is warned of once"


def test_a_game_that_cannot_be_loaded_is_replaced_by_the_next(
    games: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = broken_copy(games, tmp_path)
    change(
        files[0], pddl_problem=json.loads(files[0].read_text())["pddl_problem"].replace("(:init", "(:init (nonsense")
    )
    change(files[1], pddl_domain="(define (domain alfred))")
    files[-1].unlink()
    env = AlfworldEnv(tmp_path, max_turns=5)
    tasks = env.tasks()
    assert len(tasks) == len(files) - 1
    with caplog.at_level(logging.WARNING):
        shown = play(env, [tasks[0], tasks[2], tasks[0], tasks[1]], [0] * 4, choose, 5)
        assert shown[0] == shown[1] == shown[2] == shown[3]
        gone = AlfworldTask(files[-1].parent.relative_to(tmp_path).as_posix(), tasks[0].task_type)
        assert play(env, [gone], [0], choose, 5)[0] == shown[0], "after the last comes the first"
    assert env.skipped_tasks == 3
    assert len(caplog.messages) == 3
    assert all("the next game of its split is played instead" in message for message in caplog.messages)
    for path in files[:-1]:
        path.unlink()
    with pytest.raises(ValueError, match=r"no game of the split of .* can be played"):
        env.reset(tasks[:1], [0])


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_temporary_folder_without_room_is_named(games: Path, workers: int, fast: bool, tmp_path: Path) -> None:
    """Not the game is at fault, nor is another one played in its place."""
    program = (
        "import resource, sys\n"
        "from rspo.config import Config\n"
        "from rspo.config.files import apply_flags\n"
        "from rspo.start import build_env\n"
        "def main():\n"
        f"    flags = ['env.name=alfworld', 'env.workers={workers}', 'env.options={{data: {games}, fast: {fast}}}']\n"
        "    env = build_env(apply_flags(Config(), flags))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "    try:\n        env.reset(env.tasks()[:1], [0])\n"
        "    except OSError as error:\n        print(type(error).__name__, error)\n"
        "    env.close()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert (
        f"ResourceError the planner's library could not be loaded from the temporary folder {tmp_path}" in done.stdout
    )
    assert "File too large" in done.stdout
    assert "set TMPDIR" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "skipped" not in done.stderr


def test_data_folders(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALFWorld's own layout, `valid_train` in place of `train`, games without splits; by argument or by variable."""
    tasks = AlfworldEnv(games).tasks()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    (tmp_path / "json_2.1.1").mkdir()
    (tmp_path / "json_2.1.1" / "valid_train").symlink_to(games / "train")
    renamed = AlfworldEnv().tasks()
    assert [task.game.replace("valid_train", "train") for task in renamed] == [task.game for task in tasks]
    loose = AlfworldEnv(games / "train")
    assert loose.tasks("train") == loose.tasks("eval")
    assert [f"train/{task.game}" for task in loose.tasks()] == [task.game for task in tasks]
    some = AlfworldEnv(games, task_types=["pick_two_obj_and_place"]).tasks()
    assert some == tuple(task for task in tasks if task.task_type == "pick_two_obj_and_place")
    unseen = AlfworldEnv(games, eval_split="eval_out_of_distribution")
    assert unseen.tasks("eval") == unseen.tasks("eval_out_of_distribution") != unseen.tasks("eval_in_distribution")


def test_wrong_arguments_and_missing_data(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    help_ = r"set ALFWORLD_DATA or the argument data.*`alfworld-download`.*`rspo envs alfworld generate --out DIR`"
    with pytest.raises(ValueError, match=f"there are no ALFWorld games to play; {help_}"):
        AlfworldEnv()
    with pytest.raises(ValueError, match=f"data must be a folder with ALFWorld games, but '.*none' is none; {help_}"):
        AlfworldEnv(tmp_path / "none")
    with pytest.raises(ValueError, match=f"has none of the folders train, .* and no game.tw-pddl; {help_}"):
        AlfworldEnv(tmp_path)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="ALFWORLD_DATA must be a folder"):
        AlfworldEnv()
    with pytest.raises(ValueError, match=r"task_types must be some of pick_and_place_simple, .*; got 'look'"):
        AlfworldEnv(games, task_types="look")
    with pytest.raises(ValueError, match=r"eval_split must be one of .*; got 'train'"):
        AlfworldEnv(games, eval_split="train")
    with pytest.raises(ValueError, match="max_turns"):
        AlfworldEnv(games, max_turns=0)
    env = AlfworldEnv(games)
    with pytest.raises(ValueError, match=r"split must be one of eval, train, .*; got 'test'"):
        env.tasks("test")
    with pytest.raises(TypeError, match="tasks must be AlfworldTasks; got 'pick'"):
        env.reset(["pick"], [0])
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"has no game of the types .* that can be played"):
        AlfworldEnv(tmp_path).tasks()


def test_nothing_is_imported_before_it_is_needed_or_written_where_it_should_not(games: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from rspo.envs import make_env\n"
        "import rspo.envs.alfworld\n"
        "assert not {'textworld', 'alfworld', 'fast_downward'} & set(sys.modules)\n"
        f"env = make_env('alfworld', data={str(games)!r})\n"
        "argv, stdout = sys.argv, sys.stdout\n"
        "env.reset(env.tasks()[:1], [0]); env.expert_actions(); env.vocabulary()\n"
        "assert sys.argv is argv and sys.stdout is stdout and 'ALFWORLD_DATA' not in os.environ\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ALFWORLD_DATA"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=600, check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["textworld", "fast_downward"])
def test_a_missing_package_is_named_with_what_installs_it(games: Path, missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rspo.envs import make_env\n"
        f"try:\n    make_env('alfworld', data={str(games)!r})\nexcept ImportError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=600, capture_output=True, text=True)
    assert missing in done.stdout
    assert "pip install 'rspo[alfworld]'" in done.stdout

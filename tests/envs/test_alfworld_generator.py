"""Generated games: the same from the same seed, as dense as the official ones, won before they are kept."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from alfworld_games import COUNT, SEED, generated_games, needs_alfworld, official_games

from rspo.envs.alfworld import AlfworldEnv, generator, upstream
from rspo.envs.alfworld.commands import add_commands
from rspo.envs.alfworld.compact import vocabulary
from rspo.envs.alfworld.games import TASK_TYPES, read_game
from rspo.envs.alfworld.generator import SETTINGS_FILE, generate_games
from rspo.envs.alfworld.plain import PlainGame
from rspo.envs.alfworld.rooms import furnish, load_room, room_numbers
from rspo.envs.alfworld.speed import FastGame

pytestmark = needs_alfworld


@pytest.fixture
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_games(tmp_path_factory.getbasetemp())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_games_follow_from_the_seed(games: Path, tmp_path: Path) -> None:
    few = generate_games(tmp_path / "few", 4, SEED)
    assert dict(few.made) == {"valid_seen": 1, "valid_unseen": 1, "train": 2}
    same, all_ = contents(tmp_path / "few"), contents(games)
    assert len(all_) == 2 * COUNT + 1
    assert same.items() <= all_.items(), "the first games of a larger number are the same, byte for byte"
    generate_games(tmp_path / "other", 3, SEED + 1)
    assert not set(contents(tmp_path / "other").values()) & set(all_.values())


def test_folders_are_as_the_official_ones(games: Path) -> None:
    env = AlfworldEnv(games, eval_split="eval_out_of_distribution")
    splits = {name: env.tasks(name) for name in ("train", "eval_in_distribution", "eval_out_of_distribution")}
    assert [len(tasks) for tasks in splits.values()] == [COUNT - 2, 1, 1]
    assert env.skipped_tasks == 0
    assert Counter(task.task_type for task in splits["train"]) == Counter(
        [TASK_TYPES[number % 6] for number in range(2, COUNT)]
    )
    combinations = [task.game.split("/")[1] for tasks in splits.values() for task in tasks]
    assert len(set(combinations)) == COUNT
    for split, tasks in splits.items():
        for task in tasks:
            name = task.game.split("/")[1]
            kind, thing, movable, target, room = name.split("-")
            data = json.loads((games / task.game / "traj_data.json").read_text())
            goal = read_game(games / task.game / "game.tw-pddl").goal
            assert (kind, movable) == (task.task_type, "None") == (data["task_type"], "None")
            assert data["pddl_params"]["object_target"] == thing
            assert goal.object_type == f"{thing.lower()}type"
            assert f"{target.lower()}type" in (goal.receptacle_type, goal.lamp_type)
            assert int(room) in room_numbers(unseen=split == "eval_out_of_distribution")
    assert not set(room_numbers(True)) & set(room_numbers(False))


def test_every_game_is_won_by_its_walkthrough_and_not_before(games: Path) -> None:
    paths = sorted(games.rglob("game.tw-pddl"))
    assert len(paths) == COUNT
    for path in paths:
        data = json.loads(path.read_text())
        assert data["solvable"] is True
        game = FastGame(path)
        for command in data["walkthrough"]:
            assert not game.won
            assert game.act(command)
        assert game.won
    shortest = min(paths, key=lambda path: len(path.read_text()))
    plain = PlainGame(shortest)
    assert all([plain.act(command) for command in json.loads(shortest.read_text())["walkthrough"]])
    assert plain.won


KINDS = {0: "kitchens", 2: "living rooms", 3: "bedrooms", 4: "bathrooms"}


def test_rooms_are_as_dense_as_the_official_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By kind of room, in the rooms of the official games."""
    official: defaultdict[str, Counter[str]] = defaultdict(Counter)
    ours: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(official_games(tmp_path_factory.getbasetemp()).rglob("game.tw-pddl"))[::3]:
        number = int(path.parts[-3].split("-")[-1])
        facts = re.findall(r"\((\w+)", path.read_text().partition("(:init")[2].partition("(:goal")[0])
        counts = Counter(fact for fact in facts if fact in ("pickupable", "receptacleType", "openable", "objectType"))
        official[KINDS[number // 100]].update(counts)
        room = load_room(number)
        furnished = furnish(room, random.Random(str(path)), at_least={}, not_in={})
        assert furnished is not None
        ours[KINDS[number // 100]].update(
            pickupable=sum(thing.portable for thing in furnished.things),
            objectType=len(furnished.things),
            receptacleType=len(room.receptacles),
            openable=sum(place.openable for place in room.receptacles),
        )
    for kind in KINDS.values():
        for what, count in official[kind].items():
            assert 0.75 < ours[kind][what] / count < 1.25, f"{what} in {kind}: {ours[kind][what]} against {count}"


def test_the_game_calls_what_stands_in_a_room_by_its_kind() -> None:
    """Not "sinkbasinbasin", in a room for which the package has no place of the sink."""
    demangler = upstream.alfworld("agents.utils.misc").Demangler
    rooms = [load_room(number) for unseen in (False, True) for number in room_numbers(unseen)]
    names = set()
    for name in (place.name.lower() for room in rooms for place in room.receptacles):
        found = demangler(game_infos={name: SimpleNamespace(id=name)}, shuffle=False)
        names.add(found.demangle_alfred_name(name).split()[0])
    assert {"sinkbasin", "bathtubbasin"} <= names <= set(vocabulary())


def test_games_that_cannot_be_won_are_thrown_away_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def out_of_reach(room, rng, **limits):  # type: ignore[no-untyped-def]
        """The second room's things lie beside its receptacles, where they cannot be taken."""
        furnished = furnish(room, rng, **limits)
        calls.append(room)
        if furnished is not None and len(calls) == 2:
            for thing in furnished.things:
                thing.place = None
        return furnished

    monkeypatch.setattr(generator, "furnish", out_of_reach)
    result = generate_games(tmp_path / "games", 3, 0, task_types=["pick_and_place_simple"])
    assert result.unsolvable == 1
    assert (sum(result.made.values()), dict(result.by_type)) == (3, {"pick_and_place_simple": 3})
    assert len(contents(tmp_path / "games")) == 7


def test_wrong_arguments(tmp_path: Path) -> None:
    for count in (2, True, "3"):
        with pytest.raises(ValueError, match="count must be an integer of at least 3"):
            generate_games(tmp_path, count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"eval_share must be above 0 and below 0.5; got 0.5"):
        generate_games(tmp_path, 3, eval_share=0.5)
    with pytest.raises(ValueError, match=r"task_types must be some of .*; got 'look'"):
        generate_games(tmp_path, 3, task_types="look")
    with pytest.raises(ValueError, match=r"seed must be an integer; got 0.5"):
        generate_games(tmp_path, 3, 0.5)  # type: ignore[arg-type]
    (tmp_path / "mine").touch()
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="out must be a new or an empty folder"):
            generate_games(out, 3)
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_an_interrupted_run_leaves_whole_games_and_goes_on(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def interrupted(path: Path, text: str, **options: str) -> int:
        if path.name == "traj_data.json" and "valid_unseen" in path.parts:
            raise KeyboardInterrupt
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate_games(tmp_path, 3, SEED)
    monkeypatch.undo()
    files = set(contents(tmp_path)) - {SETTINGS_FILE}
    assert len(files) == 2
    assert all(name.startswith("valid_seen/") for name in files)

    # A process that was killed while it wrote could not clear up.
    (game,) = (tmp_path / "valid_seen").iterdir()
    (game / ".part-of-a-game").mkdir()
    result = generate_games(tmp_path, 4, SEED)
    assert (result.earlier, dict(result.made)) == (1, {"valid_seen": 1, "valid_unseen": 1, "train": 2})
    assert contents(tmp_path).items() <= contents(games).items(), "as if nothing had happened, byte for byte"
    assert len(contents(tmp_path)) == 2 * 4 + 1
    assert generate_games(tmp_path, 4, SEED).earlier == 4
    with pytest.raises(ValueError, match=r"out holds games of other settings: .*'seed': 7"):
        generate_games(tmp_path, 4, SEED + 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    out = tmp_path / "games"
    parsed = parser.parse_args(["alfworld", "generate", "--n", "3", "--seed", str(SEED), "--out", str(out), "--quiet"])
    parsed.command(parsed)
    said = capsys.readouterr()
    assert "1 valid_seen, 1 valid_unseen, 1 train; 0 that could not be won were thrown away" in said.out
    assert said.err == ""
    assert len(AlfworldEnv(out).tasks()) == 1


def test_the_command_makes_the_task_types_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    out = tmp_path / "games"
    parsed = parser.parse_args(
        ["alfworld", "generate", "--n", "3", "--out", str(out), "--types", "look_at_obj_in_light", "--quiet"]
    )
    parsed.command(parsed)
    assert capsys.readouterr().out.splitlines()[1:] == ["  look_at_obj_in_light                 3"]
    assert {task.task_type for task in AlfworldEnv(out).tasks()} == {"look_at_obj_in_light"}
    with pytest.raises(SystemExit):
        parser.parse_args(["alfworld", "generate", "--out", str(out), "--types", "look"])
    assert "invalid choice: 'look'" in capsys.readouterr().err

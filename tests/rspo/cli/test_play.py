"""`rspo play`: what is shown, what acts, and how it ends."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rspo_toys import ParityEnv

from rspo.cli import main
from rspo.cli.play import Game, choose_task, play_game
from rspo.envs.household import HouseholdEnv


def play(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, *flags: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["play", "--env", "household", "--task", "3", *flags]) == 0
    return capsys.readouterr().out


def test_the_expert_plays_to_the_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = play(capsys, monkeypatch, "", "--expert", "--set", "env.options={prompt_style: chat}")
    assert shown.startswith("household: task 3 of 461 (split 'train'), seed 0\n")
    assert "--- turn 1 of 12 ---\nYou are a careful household robot" in shown
    assert "expert> " in shown
    assert "Possible now" not in shown, "the chat prompt names the actions itself"
    assert shown.rstrip().splitlines()[-1].startswith("won after ")
    assert "reward 10, score 1" in shown


def test_a_person_acts_asks_and_takes_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = (
        "go fridge\n:undo\n:undo\n:actions\n:expert\n\n:what\n<think>x</think><action>Go Desk</action>\nfly\n:quit\n"
    )
    shown = play(capsys, monkeypatch, typed, "--set", "env.options={prompt_style: chat}")
    assert shown.count("--- turn 1 of 12 ---") == 2, "taken back"
    assert shown.count("--- turn 2 of 12 ---") == 2
    assert "nothing to take back" in shown
    assert "  go fridge\n  go microwave\n" in shown
    assert "> :expert\n  go " in shown
    assert shown.count("Type an action") == 2, "an unknown command shows the help again"
    assert "Observation: You are at the desk." in shown, "a response in tags is projected"
    assert "not a valid action; reward 0, dense reward -0.05" in shown
    assert shown.rstrip().endswith("stopped after 2 turns: reward 0, score 0, dense return -0.05")


def test_what_a_compact_prompt_leaves_out_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "(Possible now: go fridge, " in play(capsys, monkeypatch, "")


def test_a_script_reads_and_writes_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = play(capsys, monkeypatch, "go fridge\nopen fridge\n", "--json")
    states = [json.loads(line) for line in shown.splitlines()]
    assert [state["turn"] for state in states] == [0, 1, 2]
    assert [state.get("action") for state in states] == [None, "go fridge", "open fridge"]
    assert all(state["valid"] for state in states[1:])
    assert not states[-1]["ended"]
    assert "open fridge" in states[1]["admissible_actions"]
    shown = play(capsys, monkeypatch, "", "--json", "--expert")
    last = json.loads(shown.splitlines()[-1])
    assert (last["won"], last["ended"], last["reward"]) == (True, True, 10.0)


def test_a_script_gets_json_from_commands_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ":expert\n:undo\nGo  Fridge\n:actions\n:undo\n:what\n:quit\ngo desk\n"
    first, expert, nothing, went, actions, back, unknown = (
        json.loads(line) for line in play(capsys, monkeypatch, typed, "--json").splitlines()
    )
    assert expert == {"expert": "go table"}
    assert nothing == {"error": "nothing to take back"}
    assert (went["action"], went["valid"], went["turn"]) == ("go fridge", True, 1)
    assert actions == {"actions": went["admissible_actions"]}
    assert back == first
    assert unknown["error"] == "there is no command :what"


def test_what_is_shown_is_the_prompt_of_training() -> None:
    """With as many earlier turns as `env.history_length`."""
    env = HouseholdEnv(prompt_style="chat")
    game = Game(env, env.tasks()[3], 0, history_length=1)
    for action in ("go fridge", "open fridge", "go desk"):
        game.respond(action)
    assert "Turn 3. " in game.prompt
    assert "Turn 2. " not in game.prompt
    game.history_length = 0
    assert "most recent turns" not in game.prompt


def test_without_a_number_the_seed_chooses_the_task() -> None:
    env = HouseholdEnv()
    chosen = [choose_task(env, "eval", None, seed)[0] for seed in range(8)]
    assert chosen == [choose_task(env, "eval", None, seed)[0] for seed in range(8)]
    assert len(set(chosen)) > 3
    assert choose_task(env, "eval", 114, 0) == (114, env.tasks("eval")[114], 115)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "461"], "--task must be from 0 to 460 (split 'train'), got 461"),
        (["--task", "-1"], "--task must be from 0 to 460 (split 'train'), got -1"),
        (["--split", "test"], "--split: split must be one of train, eval; got 'test'"),
        (["--env", "nowhere"], "unknown environment 'nowhere'; available: "),
    ],
)
def test_wrong_arguments(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_environment_without_an_expert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["play", "--env", "rspo_parity:ParityEnv", "--expert"]) == 2
    assert "ParityEnv has no scripted expert" in capsys.readouterr().err
    assert main(["play", "--env", "household", "--expert", "--set", "env.workers=1"]) == 2
    assert "WorkerEnv has no scripted expert; set env.workers to 0" in capsys.readouterr().err
    out = io.StringIO()
    env = ParityEnv()
    play_game(Game(env, "pick", 3, 2), source=io.StringIO(":expert\n"), out=out)
    assert "ParityEnv has no scripted expert" in out.getvalue()

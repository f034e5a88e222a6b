"""Environments of one object per episode, by the example that the documentation shows."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import code_blocks
from rspo_toys import small_config

from rspo.algorithm.warmup import fresh_policy
from rspo.config import ConfigError
from rspo.engines import Scripted
from rspo.envs import make_env
from rspo.envs.base import PromptContext
from rspo.envs.episodes import Episode, EpisodeEnv
from rspo.envs.workers import WorkerEnv
from rspo.runs.records import read_metrics
from rspo.start import open_run

NAME = "number_env:NumberEnv"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The documentation's module, importable."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "number_env.py").write_text(code_blocks("environments.md")[0], encoding="utf-8")
    sys.path.insert(0, str(folder))
    import number_env

    yield number_env
    sys.path.remove(str(folder))
    del sys.modules["number_env"]


@pytest.fixture
def env(example: ModuleType) -> EpisodeEnv:
    return example.NumberEnv(max_turns=6)


def transcript(env: EpisodeEnv | WorkerEnv, tasks: list[int], actions: list[list[str]]) -> list[Any]:
    """All that the environment says, by episode."""
    observations, infos = env.reset(tasks, range(len(tasks)))
    said: list[list[Any]] = [[(o, i)] for o, i in zip(observations, infos, strict=True)]
    for turn in actions:
        observations, rewards, terminated, truncated, infos = env.step(turn)
        columns = zip(observations, rewards.tolist(), terminated.tolist(), truncated.tolist(), infos, strict=True)
        for row, seen in zip(said, columns, strict=True):
            row.append(seen)
    return said


def test_rewards_ends_and_infos(env: EpisodeEnv) -> None:
    env.reset([5, 16, 9], [0, 0, 0])
    observations, rewards, terminated, truncated, infos = env.step(["5", "20", "nonsense"])
    assert observations == ["found", "lower than 20", "guess"]
    assert rewards.tolist() == [10.0, 0.0, 0.0]
    assert rewards.dtype == np.float32
    assert terminated.tolist() == [True, False, False]
    assert truncated.tolist() == [False, False, False]
    assert [info["is_action_valid"] for info in infos] == [True, True, False]
    assert [info["won"] for info in infos] == [True, False, False]
    assert [info["task_score"] for info in infos] == [1.0, 0.0, 0.0]
    assert [info["dense_reward"] for info in infos] == pytest.approx([31 / 32, 13 / 32, 0.0])
    assert [len(info["admissible_actions"]) for info in infos] == [0, 32, 32]
    assert infos[1]["anchor"] == "lower than 20"

    observations, rewards, terminated, truncated, infos = env.step(["1", "16", "9"])
    assert rewards.tolist() == [0.0, 10.0, 10.0], "an episode that has ended earns nothing more"
    assert infos[0]["dense_reward"] == 0.0
    assert terminated.tolist() == [True, True, True]


def test_the_turn_limit_truncates_but_not_where_the_last_turn_wins(env: EpisodeEnv) -> None:
    env.reset([5, 5], [0, 0])
    for _ in range(5):
        env.step(["1", "1"])
    _, rewards, terminated, truncated, infos = env.step(["1", "5"])
    assert rewards.tolist() == [0.0, 10.0]
    assert terminated.tolist() == [False, True]
    assert truncated.tolist() == [True, False]
    assert infos[0]["admissible_actions"] == []
    env.step(["5", "5"])
    assert not env.episodes[0].won, "an episode that was cut off does not go on"


def test_an_episode_is_the_same_alone_in_a_batch_and_in_workers(env: EpisodeEnv) -> None:
    tasks, actions = [3, 17, 32, 1], [["16", "8", "x", "1"], ["3", "20", "31", "2"], ["4", "17", "32", "5"]]
    together = transcript(env, tasks, actions)
    for i, task in enumerate(tasks):
        assert transcript(env, [task], [[turn[i]] for turn in actions]) == [together[i]]
    with WorkerEnv(NAME, {"max_turns": 6}, workers=2) as workers:
        assert transcript(workers, tasks, actions) == together


def test_snapshots_can_be_restored_again_and_elsewhere(env: EpisodeEnv, example: ModuleType) -> None:
    env.reset([7, 20], [0, 0])
    env.step(["16", "16"])
    before = env.snapshot()
    after = env.step(["7", "24"])
    for place in (env, env, example.NumberEnv(max_turns=6)):
        observations, infos = place.restore(pickle.loads(pickle.dumps(before)))
        assert observations == ["lower than 16", "higher than 16"]
        assert [info["is_action_valid"] for info in infos] == [True, True]
        again = place.step(["7", "24"])
        assert again[0] == after[0]
        assert again[4] == after[4]
        np.testing.assert_array_equal(again[1], after[1])
    with pytest.raises(TypeError, match="state must be an EpisodesSnapshot"):
        env.restore("x")  # type: ignore[arg-type]


def test_the_expert_wins_and_random_actions_are_admissible(env: EpisodeEnv) -> None:
    assert isinstance(env, Scripted)
    env.reset(list(range(1, 33)), range(32))
    for _ in range(6):
        _, _, terminated, _, infos = env.step(env.expert_actions())
    assert terminated.all()
    assert all(info["won"] for info in infos)
    assert env.expert_actions() == [""] * 32
    env.reset([1, 2], [0, 0])
    env.step(["1", "1"])
    drawn = [env.random_actions(np.random.default_rng(seed)) for seed in range(50)]
    assert {first for first, _ in drawn} == {""}
    assert len({second for _, second in drawn}) > 20


class Fragile(Episode):
    """Breaks at an action."""

    task = "hold"
    observation = "whole"

    def act(self, action: str) -> bool:
        if action == "break":
            raise RuntimeError("it broke")
        self.won = self.ended = action == "win"
        return True


class FragileEnv(EpisodeEnv):
    def tasks(self, split: str = "train") -> list[int]:
        return [0]

    def start(self, task: int, seed: int) -> Episode:
        return Fragile()


def test_an_exception_loses_its_episode_only(caplog: pytest.LogCaptureFixture) -> None:
    env = FragileEnv(max_turns=3)
    env.reset([0, 0], [0, 0])
    with caplog.at_level(logging.WARNING):
        _, rewards, terminated, truncated, infos = env.step(["break", "hold"])
    assert truncated.tolist() == [True, False]
    assert terminated.tolist() == [False, False]
    assert [info["lost_worker"] for info in infos] == [True, False]
    assert "it broke" in caplog.text
    _, rewards, terminated, _, _ = env.step(["win", "win"])
    assert rewards.tolist() == [0.0, 10.0]
    assert terminated.tolist() == [False, True]
    env.reset([0, 0], [0, 0])
    env.step(["break", "hold"])
    with pytest.raises(RuntimeError, match="it broke"):
        env.step(["", "break"])


def test_without_snapshots() -> None:
    env = FragileEnv(max_turns=3)
    env.reset([0], [0])
    with pytest.raises(RuntimeError, match="cannot take snapshots"):
        env.snapshot()
    with pytest.raises(RuntimeError, match="cannot restore snapshots"):
        env.restore(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_turns": 0}, "max_turns must be an integer of at least 1; got 0"),
        ({"max_turns": 2.5}, "max_turns must be an integer of at least 1; got 2.5"),
        ({"max_turns": 2, "outcome_scale": 0}, "outcome_scale must be finite and above 0; got 0"),
        ({"max_turns": 2, "outcome_scale": "ten"}, "outcome_scale must be a number; got 'ten'"),
        ({"max_turns": 2, "prompt_style": "loud"}, "prompt_style must be one of compact, chat; got 'loud'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FragileEnv(**arguments)


def test_wrong_calls(env: EpisodeEnv) -> None:
    with pytest.raises(RuntimeError, match=r"call reset .* before step"):
        env.step(["1"])
    with pytest.raises(ValueError, match="tasks must hold at least one task"):
        env.reset([], [])
    with pytest.raises(ValueError, match=r"seeds must be as many as tasks \(1\); got 2"):
        env.reset([1], [0, 1])
    with pytest.raises(TypeError, match=r"seeds\[0\] must be an integer; got 'a'"):
        env.reset([1], ["a"])  # type: ignore[list-item]
    env.reset([1], [0])
    with pytest.raises(ValueError, match=r"actions must be as many as episodes \(1\); got 2"):
        env.step(["1", "2"])
    with pytest.raises(TypeError, match="actions must be a sequence of strings"):
        env.step("1")
    env.close()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(["1"])


def test_both_styles_of_prompt(example: ModuleType) -> None:
    context = PromptContext("find the number", (("guess", "16"),), "lower than 16", ("1", "2"), 1)
    compact = example.NumberEnv(max_turns=6, prompt_style="compact")
    assert compact.render_prompt(context) == "task: find the number\nguess > 16\nlower than 16\n1 | 2\n>"
    assert compact.render_reply(context) == "lower than 16\n>"
    assert compact.project(" 7\n") == ("7", True)
    assert compact.project("  ") == ("", False)
    assert compact.project(compact.render_action("7")) == ("7", True)

    chat = example.NumberEnv(max_turns=6)
    prompt = chat.render_prompt(context)
    assert prompt.startswith("You look for a hidden number between 1 and 32.\nYour task: find the number\n")
    for part in ("Actions taken so far: 1.", "Turn 1. Observation: guess Action: 16", "lower than 16", ":\n'1'\n'2'\n"):
        assert part in prompt
    assert chat.project("<think>half</think> <action> 7 </action>") == ("7", True)
    assert chat.project("<action>7</action>") == ("7", False), "a thought is part of a well-formed response"
    assert chat.project("I say 7") == ("i say 7", False)
    assert chat.project(chat.render_action("7")) == ("7", True)
    assert "lower than 16" in chat.render_reply(context)


FLAGS = (
    f"env.name={NAME}",
    "warmup.trajectories=60",
    "warmup.check_episodes=64",
    "warmup.max_updates=200",
    "warmup.band=[0.1,0.9]",
    "warmup.held_out_band=[0.0,1.0]",
)


def test_the_example_trains_from_a_small_model_over_its_words(example: ModuleType, tmp_path: Path) -> None:
    config = small_config(*FLAGS, "env.options={max_turns: 6, prompt_style: compact}", "warmup.width=32")
    trainer = open_run(config, tmp_path / "run", progress=False)
    tokenizer = trainer.agent.policy.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("higher than 16").input_ids) == ["higher", "than", "16"]
    assert trainer.agent.policy.model.config.hidden_size == 32
    trainer.train()
    evaluations = read_metrics(tmp_path / "run", "evaluation")
    assert [record["step"] for record in evaluations] == [0, 2]
    assert all(np.isfinite(record["success"]) for record in evaluations)


def test_without_a_list_of_words_pieces_are_learned(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.NumberEnv, "vocabulary", lambda self: None)
    config = small_config(*FLAGS, "env.options={max_turns: 6}", "warmup.pieces=400", "warmup.layers=1")
    torch.manual_seed(0)
    policy = fresh_policy(make_env(NAME, max_turns=6), config)
    prompt = make_env(NAME, max_turns=6).render_prompt(PromptContext("find the number", (), "guess", ("1",), 0))
    (ids,) = policy.encode([prompt])
    assert policy.decode([ids]) == [prompt], "pieces keep every character"
    assert len(ids) < len(prompt) / 2
    assert len(policy.tokenizer) <= 400
    assert len(policy.model.model.layers) == 1
    same = fresh_policy(make_env(NAME, max_turns=6), config)
    assert same.tokenizer.get_vocab() == policy.tokenizer.get_vocab()


def test_a_start_policy_needs_an_expert() -> None:
    config = small_config("warmup.trajectories=2")
    with pytest.raises(ConfigError, match=r"FragileEnv has no scripted expert; .* set policy\.path"):
        fresh_policy(FragileEnv(max_turns=3), config)


class Brittle(Episode):
    """Breaks in two places."""

    task, observation = "hold", "it holds"

    def act(self, action: str) -> bool:
        if action == "drop":
            raise ZeroDivisionError(f"{id(self)} is broken")
        if action == "throw":
            raise ZeroDivisionError("gone")
        return True


class BrittleEnv(EpisodeEnv):
    def __init__(self) -> None:
        super().__init__(max_turns=9)

    def tasks(self, split: str = "train") -> list[int]:
        return [0]

    def start(self, task: int, seed: int) -> Brittle:
        return Brittle()


def test_lost_episodes_have_one_traceback_for_each_kind_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    env = BrittleEnv()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            env.reset([0] * 4, range(4))
            env.step(["drop", "drop", "throw", "hold"])
    assert len(caplog.messages) == 9
    assert ["Traceback" in message for message in caplog.messages] == [True, False, True] + [False] * 6
    counts = [int(message.split("number ")[1].split()[0]) for message in caplog.messages if "number " in message]
    assert counts == [2, 3, 4, 2, 5, 6, 3]
    assert all("is lost: 'drop' raised ZeroDivisionError" in message for message in caplog.messages[::3])

"""What an environment returns is checked wherever episodes are played; errors say what is wrong with what."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from rspo_parity import ParityEnv

from rspo.cli.play import Game
from rspo.data.trajectory import Trajectory, Turn, trajectory_from_json, trajectory_to_json
from rspo.envs.base import EnvironmentValueError, Info, StepResult
from rspo.envs.episodes import Episode, EpisodeEnv
from rspo.envs.returned import reset_checked, step_checked
from rspo.envs.workers import WorkerEnv

Change = Callable[[list[Any]], None]


def put(part: int, value: Any) -> Change:
    """One of the parts that `step` returns."""

    def change(result: list[Any]) -> None:
        result[part] = value

    return change


def put_info(key: str, value: Any) -> Change:
    """Episode 1's value in the infos, the last part."""

    def change(result: list[Any]) -> None:
        result[-1][1] = {**result[-1][1], key: value}

    return change


def drop(key: str) -> Change:
    def change(result: list[Any]) -> None:
        del result[-1][1][key]

    return change


INFOS: dict[str, tuple[Change, str]] = {
    "info none": (lambda result: result[-1].__setitem__(1, None), r"infos of episode 1 must be a dict; got None"),
    "task": (put_info("task", 3), r"infos\['task'\] of episode 1 must be a str; got 3 \(int\)"),
    "anchor none": (put_info("anchor", None), r"infos\['anchor'\] of episode 1 must be a str, or .*; got None"),
    "anchor list": (put_info("anchor", ["a"]), r"infos\['anchor'\] of episode 1 .* got \['a'\] \(list\)"),
    "anchor bytes": (put_info("anchor", b"x"), r"infos\['anchor'\] of episode 1 must be a str, or .*; got b'x'"),
    "anchor tensor": (put_info("anchor", torch.tensor(1)), r"\['anchor'\] of episode 1 must .*tensor\(1\) \(Tensor\)"),
    "anchor part": (put_info("anchor", (1, None)), r"\['anchor'\] of episode 1 must be .*got \(1, None\)"),
    "actions text": (
        put_info("admissible_actions", "look"),
        r"\['admissible_actions'\] of episode 1 must be a list of",
    ),
    "actions mixed": (put_info("admissible_actions", ["a", None]), r"must be a list of str .*got \['a', None\]"),
    "actions none": (put_info("admissible_actions", None), r"must be a list of str .*got None"),
    "valid": (put_info("is_action_valid", None), r"\['is_action_valid'\] of episode 1 must be a bool; got None"),
    "won none": (put_info("won", None), r"infos\['won'\] of episode 1 must be a bool; got None \(NoneType\)"),
    "won text": (put_info("won", "no"), r"infos\['won'\] of episode 1 must be a bool; got 'no' \(str\)"),
    "won number": (put_info("won", 1.0), r"infos\['won'\] of episode 1 must be a bool; got 1.0 \(float\)"),
    "score nan": (put_info("task_score", float("nan")), r"\['task_score'\] of episode 1 must be a finite number"),
    "score none": (put_info("task_score", None), r"\['task_score'\] of episode 1 must be a finite number.*got None"),
    "dense": (put_info("dense_reward", np.inf), r"\['dense_reward'\] of episode 1 must be a finite number"),
    "type": (put_info("task_type", 3), r"\['task_type'\] of episode 1 must be a str"),
    "lost": (put_info("lost_worker", "no"), r"\['lost_worker'\] of episode 1 must be a bool"),
    "no task": (drop("task"), r"infos of episode 1 must be a dict with the key 'task'; got \['admissible_actions', "),
    "no won": (drop("won"), r"with the key 'won'"),
    "no dense": (drop("dense_reward"), r"with the key 'dense_reward'"),
    "infos few": (lambda result: result[-1].pop(), r"infos must be 3 values, one for each episode, not 2; got"),
    "infos none": (put(-1, None), r"infos must be a list or an array of 3, one for each episode; got None"),
    "seen none": (put(0, ["a", None, "b"]), r"observations of episode 1 must be a str; got None \(NoneType\)"),
    "seen bytes": (put(0, ["a", b"x", "b"]), r"observations of episode 1 must be a str; got b'x' \(bytes\)"),
    "seen half": (
        put(0, ["a", "b\ud800", "c"]),
        r"observations of episode 1 must be text that UTF-8 can hold",
    ),
    "actions half": (put_info("admissible_actions", ["a", "\udcff"]), r"of episode 1 must be text that UTF-8 can hold"),
    "seen text": (put(0, "abc"), r"observations must be a list or an array of 3, .*got 'abc' \(str\)"),
    "seen many": (put(0, ["a"] * 4), r"observations must be 3 values, one for each episode, not 4"),
}
STEPS: dict[str, tuple[Change, str]] = {
    "reward nan": (
        put(1, [0.0, np.nan, 0.0]),
        r"rewards of episode 1 must be a finite number of float32's range; got nan",
    ),
    "reward large": (put(1, [0.0, 1e39, 0.0]), r"rewards of episode 1 must be a finite number"),
    "reward none": (put(1, [0.0, None, 0.0]), r"rewards of episode 1 must be a finite number.*got None"),
    "reward text": (put(1, [0.0, "1", 0.0]), r"rewards of episode 1 must be a finite number.*got '1' \(str\)"),
    "rewards column": (put(1, np.zeros((3, 1))), r"rewards of episode 0 must be a finite number.*got array"),
    "rewards one": (put(1, 0.0), r"rewards must be a list or an array of 3, .*got 0.0 \(float\)"),
    "rewards few": (put(1, np.zeros(2)), r"rewards must be 3 values, one for each episode, not 2"),
    "terminated": (put(2, [False, None, False]), r"terminated of episode 1 must be a bool; got None"),
    "truncated": (put(3, np.zeros(3)), r"truncated of episode 0 must be a bool; got .*0.0.* \(float64\)"),
    "four parts": (lambda result: result.pop(), r"what it returned must be the 5 parts observations, rewards, "),
}
CASES = INFOS | STEPS


class WrongEnv(ParityEnv):
    """Says what a case of `cases` makes of what it would say; in `method`."""

    def __init__(self, case: str, method: str) -> None:
        super().__init__()
        self.case, self.method = case, method

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        result = super().reset(tasks, seeds)
        return self._changed("reset", result)

    def step(self, actions: Sequence[str]) -> StepResult:
        return self._changed("step", super().step(actions))

    def _changed(self, method: str, result: tuple[Any, ...]) -> Any:
        parts = list(result)
        if method == self.method:
            CASES[self.case][0](parts)
        return tuple(parts)


STARTS = (["go"] * 3, [3, 3, 3])


@pytest.mark.parametrize("case", INFOS)
def test_what_reset_returns(case: str) -> None:
    with pytest.raises(EnvironmentValueError, match=f"environment WrongEnv, reset: .*{INFOS[case][1]}"):
        reset_checked(WrongEnv(case, "reset"), *STARTS)


@pytest.mark.parametrize("case", [*INFOS, *STEPS])
def test_what_step_returns(case: str) -> None:
    env = WrongEnv(case, "step")
    reset_checked(env, *STARTS)
    with pytest.raises(EnvironmentValueError, match=f"environment WrongEnv, step: .*{CASES[case][1]}"):
        step_checked(env, ["a"] * 3)


def test_numpys_values_lists_and_episodes_that_have_ended_are_fine() -> None:
    class Numpy(ParityEnv):
        def step(self, actions: Sequence[str]) -> StepResult:
            observations, rewards, terminated, truncated, infos = super().step(actions)
            for info in infos:
                info |= {"won": np.bool_(info["won"]), "task_score": np.float64(1), "dense_reward": np.int64(2)}
            infos[1] = {}
            return tuple(observations), rewards.tolist(), terminated.tolist(), truncated.tolist(), infos  # type: ignore

    env = Numpy()
    reset_checked(env, *STARTS)
    observations, rewards, terminated, truncated, _ = step_checked(env, ["a"] * 3, [0, 2])
    assert (len(observations), rewards.dtype, rewards.tolist()) == (3, np.float32, [0.0, 0.0, 0.0])
    assert [part.dtype for part in (terminated, truncated)] == [bool, bool]


@pytest.mark.parametrize("case", ["won none", "seen bytes", "rewards few"])
def test_workers_values(case: str) -> None:
    """They are no lost episodes, which would be played again and again."""
    with WorkerEnv("test_returned_values:WrongEnv", {"case": case, "method": "step"}, workers=2) as env:
        env.reset(["go"] * 6, [3] * 6)
        with pytest.raises(EnvironmentValueError, match=f"environment WrongEnv, step: .*{CASES[case][1]}"):
            env.step(["a"] * 6)
        assert env.lost_episodes == 0
    if case in INFOS:
        with (
            WorkerEnv("test_returned_values:WrongEnv", {"case": case, "method": "reset"}, workers=1) as env,
            pytest.raises(EnvironmentValueError, match=INFOS[case][1]),
        ):
            env.reset(*STARTS)


def test_a_played_game_is_checked() -> None:
    class One(ParityEnv):
        def step(self, actions: Sequence[str]) -> StepResult:
            result: Any = ([None], *super().step(actions)[1:])
            return result

    game = Game(One(), "go", 3, 2)
    with pytest.raises(EnvironmentValueError, match="environment One, step: observations of episode 0 must be a str"):
        game.respond("a")


@pytest.mark.parametrize("anchor", ["a", 3, 0.5, np.int64(3), np.str_("a"), ("a", (np.int64(1), 2.5)), True])
def test_anchors_are_read_back_as_they_were_written(anchor: Any) -> None:
    class Places(ParityEnv):
        def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
            observations, infos = super().reset(tasks, seeds)
            return observations, [info | {"anchor": anchor} for info in infos]

    _, infos = reset_checked(Places(), *STARTS)
    turn = Turn(np.zeros(1, int), np.zeros(1, int), np.zeros(1), 0.0, 0.0, infos[0]["anchor"], "a", True)
    written = json.dumps(trajectory_to_json(Trajectory("go", 0, 0, [turn])))
    (found,) = trajectory_from_json(json.loads(written)).turns
    assert found.anchor == anchor
    assert hash(found.anchor) == hash(anchor)


class Wrong(Episode):
    """An episode with one wrong value."""

    task, observation = "count", "1"

    def __init__(self, field: str, value: Any) -> None:
        self.answer: Any = True
        setattr(self, field, value)

    def act(self, action: str) -> bool:
        return self.answer


class WrongEpisodes(EpisodeEnv):
    def __init__(self, field: str, value: Any) -> None:
        super().__init__(max_turns=3)
        self.field, self.value = field, value

    def tasks(self, split: str = "train") -> Sequence[int]:
        return [0]

    def start(self, task: Any, seed: int) -> Wrong:
        return Wrong(self.field, self.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("task", None, "a str"),
        ("task_type", None, "a str"),
        ("observation", None, "a str"),
        ("observation", b"x", "a str"),
        ("anchor", [], "a str, or a number or a tuple of these"),
        ("admissible_actions", None, "a list of str"),
        ("admissible_actions", "look", "a list of str"),
        ("won", None, "a bool"),
        ("ended", "no", "a bool"),
        ("task", "\udc80", "text that UTF-8 can hold"),
        ("score", None, "a finite number"),
        ("dense_reward", float("nan"), "a finite number"),
    ],
)
def test_an_episodes_values(field: str, value: Any, expected: str) -> None:
    with pytest.raises(
        EnvironmentValueError, match=f"environment WrongEpisodes, Wrong: {field} of episode 0 must be {expected}"
    ):
        WrongEpisodes(field, value).reset([0], [0])


def test_an_action_that_does_not_say_whether_it_was_valid() -> None:
    env = WrongEpisodes("answer", None)
    env.reset([0], [0])
    with pytest.raises(EnvironmentValueError, match="what act returned of episode 0 must be a bool; got None"):
        env.step(["a"])


def test_an_episode_that_is_won_and_does_not_end() -> None:
    """It would count as a success, and never be paid."""
    with pytest.raises(EnvironmentValueError, match=r"ended of episode 0 must be True where won is.*; got False"):
        WrongEpisodes("won", True).reset([0], [0])


def test_a_lost_episode_may_have_left_off_halfway() -> None:
    class Halfway(Wrong):
        def act(self, action: str) -> bool:
            self.won = True
            raise ZeroDivisionError

    class Two(WrongEpisodes):
        def start(self, task: Any, seed: int) -> Wrong:
            return Halfway("answer", True) if task else Wrong("answer", True)

    env = Two("answer", True)
    env.reset([0, 1], [0, 0])
    *_, infos = step_checked(env, ["a", "a"])
    assert [info["lost_worker"] for info in infos] == [False, True]
    assert not infos[1]["won"]

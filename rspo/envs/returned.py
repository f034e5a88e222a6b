"""What an environment returns, checked where episodes are collected: one wrong value is found before it is trained on.

`reset_checked` and `step_checked` stand for `env.reset` and `env.step` wherever episodes are played. Observations and
infos of episodes that have ended are not looked at: nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .base import BatchedEnv, EnvironmentValueError, Info, StepResult

LARGEST = float(np.finfo(np.float32).max)
SHOWN = 80
"""Characters of a wrong value that an error shows."""


def reset_checked(env: BatchedEnv, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
    """`env.reset`. Raises EnvironmentValueError, and what the environment raises."""
    return check_start(env, env.reset(tasks, seeds), len(tasks))


def step_checked(env: BatchedEnv, actions: Sequence[str], running: Iterable[int] | None = None) -> StepResult:
    """`env.step`: rewards as float32, terminated and truncated as bool arrays.

    running: the episodes that had not ended before; by default all.

    Raises EnvironmentValueError, and what the environment raises.
    """
    return check_step(env, env.step(actions), len(actions), running)


def check_start(env: BatchedEnv, result: Any, episodes: int, method: str = "reset") -> tuple[list[str], list[Info]]:
    """What `reset` (or `restore`) returned. Raises EnvironmentValueError."""
    check = _Check(env, method)
    observations, infos = check.parts(result, ("observations", "infos"))
    check.rows("observations", observations, episodes)
    check.rows("infos", infos, episodes)
    for i in range(episodes):
        check.text("observations", observations[i], i)
        check.info(infos[i], i)
    return list(observations), list(infos)


def check_step(env: BatchedEnv, result: Any, episodes: int, running: Iterable[int] | None = None) -> StepResult:
    """What `step` returned. Raises EnvironmentValueError."""
    check = _Check(env, "step")
    names = ("observations", "rewards", "terminated", "truncated", "infos")
    parts = check.parts(result, names)
    for name, part in zip(names, parts, strict=True):
        check.rows(name, part, episodes)
    observations, rewards, terminated, truncated, infos = parts
    for i in range(episodes):
        check.number("rewards", rewards[i], i)
        check.truth("terminated", terminated[i], i)
        check.truth("truncated", truncated[i], i)
    for i in range(episodes) if running is None else running:
        check.text("observations", observations[i], i)
        check.info(infos[i], i)
    values = np.array(rewards, np.float32), np.array(terminated, bool), np.array(truncated, bool)
    return list(observations), *values, list(infos)


def check_episode(env: BatchedEnv, episode: Any, i: int, acted: Any = True, lost: bool = False) -> None:
    """An `Episode`'s own values, by their names there. Raises EnvironmentValueError.

    acted: what its `act` returned.
    lost: its `act` raised, and may have left off halfway.
    """
    check = _Check(env, type(episode).__name__)
    for name in ("task", "task_type", "observation"):
        check.text(name, getattr(episode, name, None), i)
    if episode.anchor is not None:
        check.anchor("anchor", episode.anchor, i)
    check.texts("admissible_actions", episode.admissible_actions, i)
    for name, value in (("won", episode.won), ("ended", episode.ended), ("what act returned", acted)):
        check.truth(name, value, i)
    if episode.won and not episode.ended and not lost:
        raise check.fail("ended", episode.ended, "True where won is: a won episode is paid when it ends", i)
    check.number("score", episode.score, i)
    check.number("dense_reward", episode.dense_reward, i)


class _Check:
    """Of one call: errors name the environment and the method (or class) that a value is from."""

    def __init__(self, env: BatchedEnv, source: str) -> None:
        env = getattr(env, "local", env)
        self.name = type(env).__name__
        self.has_dense_reward = env.has_dense_reward
        self.source = source

    def fail(self, field: str, value: Any, expected: str, episode: int | None = None) -> EnvironmentValueError:
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN else shown[: SHOWN - 3] + "..."
        where = "" if episode is None else f" of episode {episode}"
        return EnvironmentValueError(
            f"environment {self.name}, {self.source}: {field}{where} must be {expected};"
            f" got {shown} ({type(value).__name__})"
        )

    def parts(self, result: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
        if not isinstance(result, tuple | list) or len(result) != len(names):
            raise self.fail("what it returned", result, f"the {len(names)} parts {', '.join(names)}")
        return tuple(result)

    def rows(self, field: str, value: Any, episodes: int) -> None:
        is_array = isinstance(value, np.ndarray) and value.ndim > 0
        if not (is_array or isinstance(value, list | tuple)):
            raise self.fail(field, value, f"a list or an array of {episodes}, one for each episode")
        if len(value) != episodes:
            raise self.fail(field, value, f"{episodes} values, one for each episode, not {len(value)}")

    def info(self, info: Any, i: int) -> None:
        if not isinstance(info, Mapping):
            raise self.fail("infos", info, "a dict", i)
        needed: dict[str, Callable[[str, Any, int], None]] = {
            "task": self.text,
            "anchor": self.anchor,
            "admissible_actions": self.texts,
            "is_action_valid": self.truth,
            "won": self.truth,
            "task_score": self.number,
        }
        optional: dict[str, Callable[[str, Any, int], None]] = {"task_type": self.text, "lost_worker": self.truth}
        (needed if self.has_dense_reward else optional)["dense_reward"] = self.number
        for key, check in (needed | optional).items():
            if key in info:
                check(f"infos[{key!r}]", info[key], i)
            elif key in needed:
                raise self.fail("infos", sorted(map(str, info)), f"a dict with the key {key!r}", i)

    def text(self, field: str, value: Any, i: int) -> None:
        if not isinstance(value, str):
            raise self.fail(field, value, "a str", i)
        self._encodable(field, value, i)

    def texts(self, field: str, value: Any, i: int) -> None:
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self.fail(field, value, "a list of str (empty where they are not known)", i)
        for one in value:
            self._encodable(field, one, i)

    def _encodable(self, field: str, text: str, i: int) -> None:
        """Tokenizers and files take text, and not the halves of characters that a wrong decoding leaves."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.fail(field, text, "text that UTF-8 can hold, without lone surrogates", i) from None

    def truth(self, field: str, value: Any, i: int) -> None:
        if not isinstance(value, bool | np.bool_):
            raise self.fail(field, value, "a bool", i)

    def number(self, field: str, value: Any, i: int) -> None:
        is_number = isinstance(value, bool | np.bool_ | int | float | np.integer | np.floating)
        if not is_number or not -LARGEST <= value <= LARGEST:
            raise self.fail(field, value, "a finite number of float32's range", i)

    def anchor(self, field: str, value: Any, i: int) -> None:
        if not _is_anchor(value):
            raise self.fail(field, value, "a str, or a number or a tuple of these", i)


def _is_anchor(value: Any) -> bool:
    """Whether a value can be compared and hashed, and written to a file and read back."""
    if isinstance(value, tuple):
        return all(map(_is_anchor, value))
    return isinstance(value, str | int | float | np.bool_ | np.number)

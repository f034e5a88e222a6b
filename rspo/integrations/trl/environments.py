"""Environments of `rspo.envs` for TRL's `environment_factory`: an action is a call of the tool `act`.

TRL makes one `EnvironmentTool` for each completion of a generation batch, calls its `reset` with the row of the data
set, puts what that returns behind the prompt, offers the public methods to the model as tools, and hands the objects to
the reward functions. Members of a group share a row, and so a task and a seed: the same episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset

from rspo.data.control_tokens import without_usual_control_tokens
from rspo.envs import PromptContext, make_env
from rspo.envs.base import EnvironmentValueError, Info
from rspo.envs.returned import reset_checked, step_checked
from rspo.envs.wording import HOW_TO_ANSWER, bare_action

HOW_TO_ACT = "Call the tool `act` with exactly one of the actions above."
OVER = "The episode is over."


class EnvironmentTool:
    """One episode at a time, played by tool calls.

    Args:
        name, options: as `rspo.envs.make_env` takes them.

    Attributes, of the current episode:
        outcome: float, the environment's outcome reward, 0 until the episode is won.
        dense_return: float, sum of its process rewards, 0 where it has none.
        won: bool.  task_score: float, its own score.  turns: int.  is_over: bool, won or out of turns.
    """

    # A public method would be a tool: all but `reset` and `act` is an attribute or private.

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.env = make_env(name, **options)
        self.outcome, self.dense_return, self.task_score = 0.0, 0.0, 0.0
        self.won, self.is_over, self.turns = False, True, 0
        self._wrong: EnvironmentValueError | None = None

    def reset(self, task: int | None = None, seed: int | None = None, split: str = "train", **_: Any) -> str:
        """Start the episode of a row of `environment_dataset`; what the model reads of it first.

        Raises ValueError where the row has no task and no seed: members of a group need the same ones;
        EnvironmentValueError for wrong values of the environment, those in the episode before among them.
        """
        self._check()
        if task is None or seed is None:
            raise ValueError("rows must have the columns 'task' and 'seed'; environment_dataset makes such a data set")
        observations, infos = reset_checked(self.env, [self.env.tasks(split)[task]], [seed])
        self.outcome, self.dense_return, self.turns, self.is_over = 0.0, 0.0, 0, False
        self._take(infos[0])
        return _for_tools(self.env.render_opening(self._context(observations[0], infos[0])))

    def act(self, action: str) -> str:
        """Take one action in the environment and see what happens.

        Args:
            action: The action, in the words in which it was offered.
        """
        if self.is_over:
            raise ValueError(OVER)
        words = bare_action(str(action))
        try:
            observations, rewards, terminated, truncated, infos = step_checked(self.env, [words])
        except EnvironmentValueError as error:
            self._wrong = error
            raise
        except Exception as error:  # the trainer tells the model what it says
            raise RuntimeError(without_usual_control_tokens(f"{type(error).__name__}: {error}")) from error
        self.turns += 1
        self.outcome += float(rewards[0])
        self.dense_return += float(infos[0].get("dense_reward", 0.0))
        self.is_over = bool(terminated[0] or truncated[0])
        self._take(infos[0])
        if self.is_over:
            return f"{without_usual_control_tokens(observations[0])}\n{OVER}"
        return _for_tools(self.env.render_reply(self._context(observations[0], infos[0])))

    def _check(self) -> None:
        """TRL makes of what `act` raises an answer to the model, and goes on: wrong values are raised again here."""
        if self._wrong is not None:
            raise self._wrong

    def _take(self, info: Info) -> None:
        self.won, self.task_score = bool(info["won"]), float(info["task_score"])

    def _context(self, observation: str, info: Info) -> PromptContext:
        # The trainer puts these texts into its chat template; here the tokenizer is not known.
        task, seen = without_usual_control_tokens(info["task"]), without_usual_control_tokens(observation)
        admissible = tuple(map(without_usual_control_tokens, info["admissible_actions"]))
        return PromptContext(task, (), seen, admissible, self.turns)


def _for_tools(text: str) -> str:
    """An environment's words to a model that answers in tags, to one that calls tools."""
    return text.removesuffix(HOW_TO_ANSWER) + HOW_TO_ACT if text.endswith(HOW_TO_ANSWER) else text


def environment_factory(name: str, **options: Any) -> Callable[[], EnvironmentTool]:
    """What `GRPOTrainer(environment_factory=...)` takes, from an environment's name and options.

    The trainer keeps as many environments as a generation batch has completions. Raises ValueError or ImportError where
    the environment cannot be made (`rspo.envs.make_env`).
    """
    make_env(name, **options).close()
    return partial(EnvironmentTool, name, options)


def environment_dataset(name: str, size: int, *, split: str = "train", seed: int = 0, **options: Any) -> Dataset:
    """Rows for `environment_factory(name, **options)`: random tasks of a split, each with a seed of its own.

    Columns: prompt (a user's empty message, which `reset` fills), task (index in the split), seed, split. Every task
    comes before any comes twice.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    env = make_env(name, **options)
    count = len(env.tasks(split))
    env.close()
    rng = np.random.default_rng(seed)
    tasks = np.concatenate([rng.permutation(count) for _ in range(-(-size // count))])[:size]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": ""}]] * size,
            "task": tasks.tolist(),
            "seed": rng.integers(2**31, size=size).tolist(),
            "split": [split] * size,
        }
    )


def outcome_reward(environments: Sequence[EnvironmentTool], **_: Any) -> list[float]:
    """The environments' outcome rewards, one for each completion. Raises EnvironmentValueError where an environment's
    values were wrong."""
    for environment in environments:
        environment._check()
    return [environment.outcome for environment in environments]


def dense_reward(environments: Sequence[EnvironmentTool], **_: Any) -> list[float]:
    """The environments' process rewards, one sum for each completion. Raises ValueError where there are none, and
    EnvironmentValueError where an environment's values were wrong."""
    for environment in environments:
        environment._check()
        if not environment.env.has_dense_reward:
            raise ValueError(f"{type(environment.env).__name__} has no dense reward")
    return [environment.dense_return for environment in environments]

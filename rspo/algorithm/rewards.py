"""Rewards that a trajectory can be labelled with, and the swap from one to the other.

A reward function maps a trajectory to one number per turn. `relabel` writes them into the trajectories; that is all
there is to the paper's reward swap: B's trajectories are labelled with dense rewards while B learns, and with
outcome rewards before A replays them.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, ConfigError, PolicyConfig, RewardConfig
from ..data.trajectory import Trajectory
from ..models.reward_model import RewardModel, read_settings

RewardFunction = Callable[[Trajectory], Sequence[float] | np.ndarray]
"""One number per turn of a trajectory. It may also have a method `score(trajectories)`, which gives those of several
trajectories at once and is then called instead."""


class NonFiniteError(RuntimeError):
    """A reward, loss or gradient is not a finite number; the message names where."""


def outcome_reward(trajectory: Trajectory) -> np.ndarray:
    """The environment's own reward, float32 [turns]: 0 until the last turn."""
    return np.array([turn.reward for turn in trajectory.turns], dtype=np.float32)


def environment_dense_reward(trajectory: Trajectory) -> np.ndarray:
    """The environment's process reward, float32 [turns]."""
    return np.array([turn.dense_reward for turn in trajectory.turns], dtype=np.float32)


class NamedReward:
    """A reward function of the user's own.

    Args:
        name: "package.module:function", the setting `rewards.dense`. Raises ConfigError where that is no function.
        function: what it names, where that cannot be imported.
    """

    def __init__(self, name: str, function: RewardFunction | None = None) -> None:
        self.name = name
        self.function: Any = function or _imported(name)
        if not callable(self.function):
            raise self._wrong(f"it is of type {type(self.function).__name__}")

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Its rewards. Raises ConfigError where it fails or does not give one number per turn."""
        try:
            given = score_all(self.function, trajectories)
            rewards = [np.asarray(values, dtype=np.float32) for values in given]
        except ConfigError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f" at {frame.filename}:{frame.lineno}" if frame.filename != __file__ else ""
            raise self._wrong(f"it raised {type(error).__name__}{where}: {error}") from error
        if len(rewards) != len(trajectories):
            raise self._wrong(f"its score() gave {len(rewards)} rows for {len(trajectories)} trajectories")
        for trajectory, values in zip(trajectories, rewards, strict=True):
            if values.shape != (len(trajectory),):
                raise self._wrong(f"it gave shape {values.shape} for {trajectory}, which has {len(trajectory)} turns")
        return rewards

    def __call__(self, trajectory: Trajectory) -> np.ndarray:
        return self.score([trajectory])[0]

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(
            f"rewards.dense={self.name!r} must be a function of a Trajectory to one number per turn: {what}"
        )


def _imported(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards.dense={name!r} cannot be imported: {error}") from error


class LearnedReward:
    """A process reward model's rewards; the model is loaded when they are first asked for.

    Args:
        path: its folder. Raises ConfigError where there is no complete one.
        config: device, dtype and attention of the model.
    """

    def __init__(self, path: str, config: PolicyConfig) -> None:
        self.path = path
        self.config = config
        self.model: RewardModel | None = None
        read_settings(Path(path))

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """r̂ of each trajectory's turns, float32 [turns] each."""
        if self.model is None:
            self.model = RewardModel.load(self.path, self.config)
        return self.model.score(trajectories)

    def __call__(self, trajectory: Trajectory) -> np.ndarray:
        return self.score([trajectory])[0]


class DenseReward:
    """A dense reward with scale and Gaussian noise on every turn (the paper's appendix D).

    Args:
        source: the reward without them.
        scale: factor; GRPO's division by the standard deviation undoes it, other estimators want the outcome's scale.
        noise: standard deviation of the noise, in units of the unscaled reward.
        rng: source of the noise.
    """

    def __init__(self, source: RewardFunction, scale: float, noise: float, rng: np.random.Generator) -> None:
        self.source = source
        self.scale = scale
        self.noise = noise
        self.rng = rng

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Rewards of each trajectory's turns, float32 [turns] each."""
        result = []
        for values in score_all(self.source, trajectories):
            rewards = np.asarray(values, dtype=np.float32)
            if self.noise > 0:
                rewards = rewards + self.rng.normal(0.0, self.noise, size=rewards.shape).astype(np.float32)
            result.append(rewards * np.float32(self.scale))
        return result

    def __call__(self, trajectory: Trajectory) -> np.ndarray:
        return self.score([trajectory])[0]


def make_dense_reward(
    config: RewardConfig,
    has_dense_reward: bool,
    rng: np.random.Generator,
    policy: PolicyConfig | None = None,
    function: RewardFunction | None = None,
) -> DenseReward:
    """The configured dense reward; a reward model goes where `policy` is, `function` is what a function's name stands
    for where that cannot be imported. Raises ConfigError where there is none."""
    source: RewardFunction
    if config.dense == "environment":
        if not has_dense_reward:
            raise ConfigError(
                "this environment has no dense reward: set rewards.dense to 'model:FOLDER' or"
                " 'package.module:function', or swap.source to 'outcome' or 'history', or method to 'grpo'"
            )
        source = environment_dense_reward
    elif config.model_path is not None:
        try:
            source = LearnedReward(config.model_path, policy or PolicyConfig())
        except ConfigError as error:
            raise ConfigError(f"rewards.dense={config.dense!r}: {error}") from error
    else:
        source = NamedReward(config.dense, function)
    return DenseReward(source, config.scale, config.dense_noise, rng)


def score_all(reward: RewardFunction, trajectories: Sequence[Trajectory]) -> list[Any]:
    """What a reward function gives for each trajectory: all at once where it has `score`, else one by one."""
    score = getattr(reward, "score", None)
    return list(score(trajectories)) if score is not None else [reward(trajectory) for trajectory in trajectories]


def relabel(trajectories: Sequence[Trajectory], reward: RewardFunction) -> None:
    """Set the rewards that are trained on. Raises NonFiniteError that names the trajectory and turn."""
    for trajectory, values in zip(trajectories, score_all(reward, trajectories), strict=True):
        rewards = np.asarray(values, dtype=np.float32)
        if rewards.shape != (len(trajectory),):
            raise ValueError(f"{trajectory} has {len(trajectory)} turns, its reward function gave {rewards.shape}")
        if not np.isfinite(rewards).all():
            turn = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise NonFiniteError(f"reward {rewards[turn]} at turn {turn} of {trajectory}")
        trajectory.rewards = rewards


def learns_densely(config: Config) -> tuple[bool, bool]:
    """Whether agents A and B learn from dense rewards."""
    return config.rewards.train == "dense", config.method == "rspo" and config.swap.source == "dense"


def training_rewards(
    config: Config, has_dense_reward: bool, noise: np.random.Generator, function: RewardFunction | None = None
) -> tuple[RewardFunction, RewardFunction]:
    """What agents A and B learn from: A from outcomes, B from dense rewards (from outcomes in the ablation RSPO_O).
    `function` goes to `make_dense_reward`.

    Raises ConfigError where dense rewards are asked for that do not exist.
    """
    dense_a, dense_b = learns_densely(config)
    if not (dense_a or dense_b):
        return outcome_reward, outcome_reward
    dense = make_dense_reward(config.rewards, has_dense_reward, noise, config.policy, function)
    return dense if dense_a else outcome_reward, dense if dense_b else outcome_reward

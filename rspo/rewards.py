"""Rewards that a trajectory can be labelled with, and the swap from one to the other.

A reward function maps a trajectory to one number per turn. `relabel` writes them into the trajectories; that is all
there is to the paper's reward swap: B's trajectories are labelled with dense rewards while B learns, and with
outcome rewards before A replays them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import numpy as np

from .config import Config, ConfigError, RewardConfig
from .trajectory import Trajectory

RewardFunction = Callable[[Trajectory], Sequence[float] | np.ndarray]


class NonFiniteError(RuntimeError):
    """A reward, loss or gradient is not a finite number; the message names where."""


def outcome_reward(trajectory: Trajectory) -> np.ndarray:
    """The environment's own reward, float32 [turns]: 0 until the last turn."""
    return np.array([turn.reward for turn in trajectory.turns], dtype=np.float32)


def environment_dense_reward(trajectory: Trajectory) -> np.ndarray:
    """The environment's process reward, float32 [turns]."""
    return np.array([turn.dense_reward for turn in trajectory.turns], dtype=np.float32)


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

    def __call__(self, trajectory: Trajectory) -> np.ndarray:
        rewards = np.asarray(self.source(trajectory), dtype=np.float32)
        if self.noise > 0:
            rewards = rewards + self.rng.normal(0.0, self.noise, size=rewards.shape).astype(np.float32)
        return rewards * np.float32(self.scale)


def make_dense_reward(config: RewardConfig, has_dense_reward: bool, rng: np.random.Generator) -> DenseReward:
    """The configured dense reward. Raises ConfigError where there is none."""
    if config.dense == "environment":
        if not has_dense_reward:
            raise ConfigError(
                "this environment has no dense reward: set rewards.dense to 'package.module:function',"
                " or swap.source to 'outcome' or 'history', or method to 'grpo'"
            )
        return DenseReward(environment_dense_reward, config.dense_scale, config.dense_noise, rng)
    module_name, _, name = config.dense.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards.dense={config.dense!r} cannot be imported: {error}") from error
    return DenseReward(function, config.dense_scale, config.dense_noise, rng)


def relabel(trajectories: Sequence[Trajectory], reward: RewardFunction) -> None:
    """Set the rewards that are trained on. Raises NonFiniteError that names the trajectory and turn."""
    for trajectory in trajectories:
        rewards = np.asarray(reward(trajectory), dtype=np.float32)
        if rewards.shape != (len(trajectory),):
            raise ValueError(f"{trajectory} has {len(trajectory)} turns, its reward function gave {rewards.shape}")
        if not np.isfinite(rewards).all():
            turn = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise NonFiniteError(f"reward {rewards[turn]} at turn {turn} of {trajectory}")
        trajectory.rewards = rewards


def training_rewards(
    config: Config, has_dense_reward: bool, noise: np.random.Generator
) -> tuple[RewardFunction, RewardFunction]:
    """What agents A and B learn from: A from outcomes, B from dense rewards (from outcomes in the ablation RSPO_O).

    Raises ConfigError where dense rewards are asked for that do not exist.
    """
    dense_a = config.rewards.train == "dense"
    dense_b = config.method == "rspo" and config.swap.source == "dense"
    dense = make_dense_reward(config.rewards, has_dense_reward, noise) if dense_a or dense_b else outcome_reward
    return dense if dense_a else outcome_reward, dense if dense_b else outcome_reward

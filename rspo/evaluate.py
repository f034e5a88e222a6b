"""Success of a policy on fixed episodes."""

from __future__ import annotations

import torch

from .config import Config
from .engines import TransformersEngine
from .envs.base import BatchedEnv
from .layouts import make_layout
from .metrics import identical_states, trajectory_metrics
from .models import Policy
from .randomness import named_seed
from .rollout import rollout
from .trajectory import Trajectory

EVALUATION_SEED = 1_000_003
"""First episode seed of an evaluation; training draws others."""


def play(
    policy: Policy, env: BatchedEnv, config: Config, *, split: str, episodes: int, temperature: float
) -> list[Trajectory]:
    """`episodes` episodes over the tasks of a split in turn, one each. The same episodes at every call."""
    tasks = env.tasks(split)
    generator = torch.Generator(policy.device)
    generator.manual_seed(named_seed(config.run.seed, "evaluation"))
    engine = TransformersEngine(policy, config.rollout, generator, temperature)
    return rollout(
        env,
        engine,
        make_layout(config.env.layout, policy, env),
        [tasks[i % len(tasks)] for i in range(episodes)],
        range(EVALUATION_SEED, EVALUATION_SEED + episodes),
        group_size=1,
        history_length=config.env.history_length,
    )


def evaluate(policy: Policy, env: BatchedEnv, config: Config) -> dict[str, float]:
    """Metrics on the held-out episodes that the configuration asks for."""
    settings = config.evaluation
    trajectories = play(
        policy, env, config, split=settings.split, episodes=settings.episodes, temperature=settings.temperature
    )
    return trajectory_metrics(trajectories) | identical_states(trajectories)

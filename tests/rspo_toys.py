"""Small things for the trainer's tests: an environment with prompts of many lengths, tiny policies, trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rspo.config import Config, default_config
from rspo.config_io import apply_flags
from rspo.envs.base import BatchedEnv, Info, PromptContext, StepResult
from rspo.envs.household import VOCABULARY
from rspo.models import Policy, tiny_policy
from rspo.trajectory import Trajectory, Turn


class ParityEnv(BatchedEnv):
    """Episode (task, seed) lasts 1 + seed % 4 turns and is won if the last answer's first word has as many letters,
    modulo 2, as the task: half of all random answers. Short words earn dense reward. Prompts grow with the turn, so
    that a batch of them needs padding.
    """

    max_turns = 4

    def __init__(self, reward: float = 10.0, dense: bool = True) -> None:
        self.reward = reward
        self.has_dense_reward = dense

    def tasks(self, split: str = "train") -> Sequence[str]:
        return VOCABULARY[:6] if split == "train" else VOCABULARY[6:8]

    def reset(self, tasks: Sequence[Any], seeds: Sequence[int]) -> tuple[list[str], list[Info]]:
        self._tasks, self._length = list(tasks), [1 + int(seed) % self.max_turns for seed in seeds]
        self._turn = 0
        self._won = [False] * len(tasks)
        return ["ok"] * len(tasks), [self._info(i, "ok") for i in range(len(tasks))]

    def step(self, actions: Sequence[str]) -> StepResult:
        self._turn += 1
        rewards = np.zeros(len(actions), dtype=np.float32)
        for i, action in enumerate(actions):
            word = (action.split() or [""])[0]
            if self._turn == self._length[i] and len(word) % 2 == len(self._tasks[i]) % 2:
                self._won[i], rewards[i] = True, self.reward
        ended = np.array([self._turn >= length for length in self._length])
        won = np.array(self._won)
        infos = [self._info(i, action) for i, action in enumerate(actions)]
        return ["ok failed"[: 2 + 7 * (self._turn % 2)]] * len(actions), rewards, won, ended & ~won, infos

    def _info(self, i: int, action: str) -> Info:
        return {
            "task": self._tasks[i],
            "anchor": f"turn {self._turn}",
            "admissible_actions": [],
            "is_action_valid": bool(action),
            "won": self._won[i],
            "task_score": float(self._won[i]),
            "dense_reward": float(len(action) < 8),
        }

    def render_prompt(self, context: PromptContext) -> str:
        return " ".join([context.task, *(observation for observation, _ in context.history), context.observation])

    def project(self, response: str) -> tuple[str, bool]:
        return response, bool(response)


def small_config(*flags: str, method: str = "rspo") -> Config:
    """Household settings at a size for tests."""
    small = [
        "rollout.tasks=4",
        "rollout.group_size=4",
        "swap.k=2",
        "swap.alpha=0.25",
        "swap.buffer_tasks=3",
        "optimizer.minibatches=2",
        "evaluation.every=0",
        "evaluation.episodes=8",
        "run.steps=2",
    ]
    return apply_flags(default_config(method), [*small, *flags])


def small_policy(seed: int = 0) -> Policy:
    """A fresh tiny policy."""
    return tiny_policy(VOCABULARY, seed, Config().policy)


def make_trajectory(
    group: int = 0,
    index: int = 0,
    *,
    turns: int = 2,
    reward: float = 0.0,
    task_score: float | None = None,
    advantage: float | None = None,
    invalid: Sequence[int] = (),
    seed: int = 0,
) -> Trajectory:
    """A trajectory with random tokens; reward comes at the last turn, `advantage` is the same at all turns."""
    rng = np.random.default_rng((seed, group, index))
    made = [
        Turn(
            prompt_ids=rng.integers(3, 40, size=3 + turn),
            response_ids=rng.integers(3, 40, size=1 + turn % 2),
            behavior_logp=rng.normal(-2.0, 0.5, size=1 + turn % 2).astype(np.float32),
            reward=reward if turn == turns - 1 else 0.0,
            dense_reward=0.1 * turn,
            anchor=f"place {turn % 2}",
            action="go",
            is_action_valid=turn not in invalid,
        )
        for turn in range(turns)
    ]
    trajectory = Trajectory(task=f"task {group}", group=group, index=index, turns=made)
    trajectory.won = reward > 0
    trajectory.task_score = float(reward > 0) if task_score is None else task_score
    trajectory.rewards = np.array([turn.reward for turn in made], dtype=np.float32)
    if advantage is not None:
        trajectory.advantages = np.full(turns, advantage, dtype=np.float32)
    return trajectory


def copies(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories that can be relabelled without touching the originals."""
    return [replace(trajectory) for trajectory in trajectories]

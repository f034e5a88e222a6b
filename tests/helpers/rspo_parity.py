"""A small environment. It is apart from the other toys so that its worker processes need not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rspo.envs.base import BatchedEnv, Info, PromptContext, StepResult
from rspo.envs.household import VOCABULARY


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

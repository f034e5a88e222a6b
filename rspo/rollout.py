"""Multi-turn rollouts: many episodes side by side, one batch of prompts per turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .engines import Engine
from .envs.base import BatchedEnv, Info, PromptContext
from .timing import PhaseTimer
from .trajectory import Trajectory, Turn


class Episodes:
    """A batch of episodes under way: their histories, prompts, and which of them still run.

    Args:
        env: the environment; its state belongs to this object until the episodes have ended.
        tasks, seeds: of each episode.
        history_length: (observation, action) pairs that a prompt repeats.
    """

    def __init__(self, env: BatchedEnv, tasks: Sequence[Any], seeds: Sequence[int], history_length: int) -> None:
        self.env = env
        self.history_length = history_length
        self.observations, self.infos = env.reset(tasks, seeds)
        self.histories: list[tuple[tuple[str, str], ...]] = [()] * len(tasks)
        self.running = list(range(len(tasks)))
        self.turn = 0

    def prompts(self) -> list[str]:
        """A prompt for each running episode."""
        return [
            self.env.render_prompt(
                PromptContext(
                    task=self.infos[i]["task"],
                    history=self.histories[i],
                    observation=self.observations[i],
                    admissible_actions=tuple(self.infos[i]["admissible_actions"]),
                    turn=self.turn,
                )
            )
            for i in self.running
        ]

    def step(self, actions: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[Info]]:
        """Act in each running episode: rewards float32 [episodes], truncated bool [episodes], infos of all episodes.

        Episodes that end leave `running`.
        """
        everyone = [""] * len(self.histories)
        for i, action in zip(self.running, actions, strict=True):
            everyone[i] = action
            pair = (self.observations[i], action)
            self.histories[i] = (*self.histories[i], pair)[-self.history_length :] if self.history_length else ()
        self.observations, rewards, terminated, truncated, self.infos = self.env.step(everyone)
        self.running = [i for i in self.running if not (terminated[i] or truncated[i])]
        self.turn += 1
        return rewards, truncated & ~terminated, self.infos


def rollout(
    env: BatchedEnv,
    engine: Engine,
    tasks: Sequence[Any],
    seeds: Sequence[int],
    *,
    group_size: int,
    history_length: int,
    timer: PhaseTimer | None = None,
) -> list[Trajectory]:
    """Play every (task, seed) `group_size` times; the trajectories of a group stand together.

    A finished episode leaves the batch: nothing is generated for it and it adds no turn.
    """
    timer = timer or PhaseTimer()
    with timer("environment"):
        repeated = [task for task in tasks for _ in range(group_size)]
        episodes = Episodes(env, repeated, [seed for seed in seeds for _ in range(group_size)], history_length)
        trajectories = [
            Trajectory(task=info["task"], group=i // group_size, index=i % group_size)
            for i, info in enumerate(episodes.infos)
        ]
    while episodes.running:
        acting = list(episodes.running)
        with timer("environment"):
            prompts = episodes.prompts()
            anchors = [episodes.infos[i]["anchor"] for i in acting]
        with timer("generation"):
            generations = engine.generate(prompts)
        with timer("environment"):
            projected = [env.project(generation.text) for generation in generations]
            rewards, truncated, infos = episodes.step([action for action, _ in projected])
            written = zip(acting, anchors, generations, projected, strict=True)
            for i, anchor, generation, (action, well_formed) in written:
                trajectory, info = trajectories[i], infos[i]
                trajectory.turns.append(
                    Turn(
                        prompt_ids=generation.prompt_ids,
                        response_ids=generation.response_ids,
                        behavior_logp=generation.logp,
                        reward=float(rewards[i]),
                        dense_reward=float(info.get("dense_reward", 0.0)),
                        anchor=anchor,
                        action=action,
                        is_action_valid=well_formed and info["is_action_valid"],
                    )
                )
                trajectory.won, trajectory.task_score = info["won"], info["task_score"]
                trajectory.truncated = bool(truncated[i])
    return trajectories

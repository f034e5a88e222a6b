"""Multi-turn rollouts: many episodes side by side, one batch of prompts per turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..data.layouts import Layout
from ..data.trajectory import Trajectory, Turn
from ..engines import Engine
from ..envs.base import BatchedEnv, Info, PromptContext
from ..envs.returned import reset_checked, step_checked
from .timing import PhaseTimer


class Episodes:
    """A batch of episodes under way: their histories, prompts, and which of them still run.

    Args:
        env: the environment; its state belongs to this object until the episodes have ended.
        layout: makes the prompts.
        tasks, seeds: of each episode.
        history_length: (observation, action) pairs that a prompt repeats.
    """

    def __init__(
        self, env: BatchedEnv, layout: Layout, tasks: Sequence[Any], seeds: Sequence[int], history_length: int
    ) -> None:
        self.env = env
        self.layout = layout
        self.history_length = history_length
        self.observations, self.infos = reset_checked(env, tasks, seeds)
        self.histories: list[tuple[tuple[str, str], ...]] = [()] * len(tasks)
        self.said: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(tasks)
        self.running = list(range(len(tasks)))
        self.turn = 0

    def prompts(self, of: Sequence[int] | None = None) -> list[np.ndarray]:
        """Prompt ids int64 [P] for each running episode (or those of `of`)."""
        episodes = self.running if of is None else of
        return self.layout.prompts([self._context(i) for i in episodes], [self.said[i] for i in episodes])

    def messages(self) -> list[str]:
        """What a conversation would say now to the model of each running episode, whatever the layout."""
        render = self.env.render_reply if self.turn else self.env.render_opening
        return [render(self._context(i)) for i in self.running]

    def _context(self, i: int) -> PromptContext:
        return PromptContext(
            task=self.infos[i]["task"],
            history=self.histories[i],
            observation=self.observations[i],
            admissible_actions=tuple(self.infos[i]["admissible_actions"]),
            turn=self.turn,
        )

    def step(
        self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], actions: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, list[Info]]:
        """Act in each running episode: rewards float32 [episodes], truncated bool [episodes], infos of all episodes.

        prompts, responses: the ids that were read and written. Episodes that end leave `running`.

        Raises EnvironmentValueError where the environment returns what the contract does not allow.
        """
        everyone = [""] * len(self.histories)
        for i, prompt, response, action in zip(self.running, prompts, responses, actions, strict=True):
            everyone[i] = action
            self.said[i] = (prompt, response)
            pair = (self.observations[i], action)
            self.histories[i] = (*self.histories[i], pair)[-self.history_length :] if self.history_length else ()
        result = step_checked(self.env, everyone, self.running)
        self.observations, rewards, terminated, truncated, self.infos = result
        self.running = [i for i in self.running if not (terminated[i] or truncated[i])]
        self.turn += 1
        return rewards, truncated & ~terminated, self.infos


def rollout(
    env: BatchedEnv,
    engine: Engine,
    layout: Layout,
    tasks: Sequence[Any],
    seeds: Sequence[int],
    *,
    group_size: int,
    history_length: int,
    timer: PhaseTimer | None = None,
    on_turn: Callable[[int, int], None] | None = None,
) -> list[Trajectory]:
    """Play every (task, seed) `group_size` times; the trajectories of a group stand together.

    A finished episode leaves the batch: nothing is generated for it and it adds no turn.

    on_turn: called after each turn with the number of turns played and of episodes that still run.
    """
    if not tasks:
        return []
    timer = timer or PhaseTimer()
    with timer("environment"):
        repeated = [task for task in tasks for _ in range(group_size)]
        repeated_seeds = [seed for seed in seeds for _ in range(group_size)]
        episodes = Episodes(env, layout, repeated, repeated_seeds, history_length)
        trajectories = [
            Trajectory(
                task=info["task"], group=i // group_size, index=i % group_size, task_type=info.get("task_type", "")
            )
            for i, info in enumerate(episodes.infos)
        ]
    while episodes.running:
        acting = list(episodes.running)
        with timer("environment"):
            prompts, messages = episodes.prompts(), episodes.messages()
            anchors = [episodes.infos[i]["anchor"] for i in acting]
        with timer("generation"):
            generations = engine.generate(prompts)
        with timer("environment"):
            projected = [env.project(generation.text) for generation in generations]
            responses = [generation.response_ids for generation in generations]
            rewards, truncated, infos = episodes.step(prompts, responses, [action for action, _ in projected])
            for i in acting:
                trajectories[i].truncated = bool(truncated[i])
                trajectories[i].lost = bool(infos[i].get("lost_worker", False))
            cut_off = [i for i in acting if truncated[i] and not trajectories[i].lost]
            for i, prompt in zip(cut_off, episodes.prompts(cut_off), strict=True):
                trajectories[i].final_prompt_ids = prompt
            written = zip(acting, prompts, messages, anchors, generations, projected, strict=True)
            for i, prompt, message, anchor, generation, (action, well_formed) in written:
                trajectory, info = trajectories[i], infos[i]
                trajectory.turns.append(
                    Turn(
                        prompt_ids=prompt,
                        response_ids=generation.response_ids,
                        behavior_logp=generation.logp,
                        reward=float(rewards[i]),
                        dense_reward=float(info.get("dense_reward", 0.0)),
                        anchor=anchor,
                        action=action,
                        is_action_valid=bool(well_formed and info["is_action_valid"]),
                        message=message,
                        response=generation.text,
                        engine_logp=generation.engine_logp,
                        is_well_formed=bool(well_formed),
                    )
                )
                # Plain values: an environment may say them in numpy's types, which JSON does not know.
                trajectory.won, trajectory.task_score = bool(info["won"]), float(info["task_score"])
        if on_turn is not None:
            on_turn(episodes.turn, len(episodes.running))
    return trajectories

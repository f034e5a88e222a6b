"""A demonstrator in the place of a model: an environment's scripted expert, mixed with random actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..config import ConfigError, RolloutConfig
from ..data.texts import Texts
from ..envs.base import BatchedEnv
from ..envs.workers import WorkerEnv
from .base import Generation


@runtime_checkable
class Scripted(Protocol):
    """An environment that can act by itself."""

    def expert_actions(self) -> list[str]:
        """The expert's next action for every episode of the batch, "" for those that have ended."""
        ...

    def random_actions(self, rng: np.random.Generator, *, admissible: bool = True) -> list[str]:
        """A random action for every episode of the batch, "" for those that have ended."""
        ...

    def render_action(self, action: str) -> str:
        """A response that the environment's `project` turns into the given action."""
        ...


def expert_of(env: BatchedEnv, otherwise: str = "") -> Scripted:
    """The environment as one with an expert.

    Raises ConfigError where it has none; `otherwise` says in its message what else can be done.
    """
    if not isinstance(env, Scripted):
        hint = "set env.workers to 0" if isinstance(env, WorkerEnv) else otherwise
        raise ConfigError(f"{type(env).__name__} has no scripted expert" + (f"; {hint}" if hint else ""))
    return env


class ScriptedEngine:
    """An engine that acts by looking at the environment instead of the prompts.

    Args:
        env: the environment of the episodes under way.
        texts: whose tokenizer cuts the responses.
        config: `max_response_tokens`.
        expert_rate: probability that a step is the expert's; otherwise it is random.
        rng: source of randomness.
    """

    def __init__(
        self, env: Scripted, texts: Texts, config: RolloutConfig, expert_rate: float, rng: np.random.Generator
    ) -> None:
        self.env = env
        self.texts = texts
        self.config = config
        self.expert_rate = expert_rate
        self.rng = rng

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each running episode, with log-probs of 0."""
        # Random among all actions, most of which fail: among accepted ones it would already know the environment.
        expert, random = self.env.expert_actions(), self.env.random_actions(self.rng, admissible=False)
        take_expert = self.rng.random(len(expert)) < self.expert_rate
        acting = [i for i, action in enumerate(expert) if action]
        if len(acting) != len(prompts):
            raise RuntimeError(f"{len(prompts)} episodes run, but the expert has an action for {len(acting)}")
        texts = [self.env.render_action(expert[i] if take_expert[i] else random[i]) for i in acting]
        responses = [self._ended(response) for response in self.texts.encode_responses(texts)]
        return [
            Generation(text, response, np.zeros(len(response), dtype=np.float32))
            for text, response in zip(texts, responses, strict=True)
        ]

    def _ended(self, response: np.ndarray) -> np.ndarray:
        """A response with its end-of-sequence token, where the length limit leaves room for one."""
        end = self.texts.eos_token_ids[:1]
        return (
            response if len(response) >= self.config.max_response_tokens else np.append(response, end).astype(np.int64)
        )

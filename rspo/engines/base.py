"""The one interface between rollouts and whatever generates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..config import ConfigError, RolloutConfig
from ..data.texts import Texts
from ..models.policy import Policy


class EngineError(RuntimeError):
    """An engine has failed, or has answered what it must not; the message says what was expected."""


@dataclass(slots=True)
class Generation:
    """A response: its text, and the tokens that training needs.

    response_ids int64 [T]; logp float32 [T], log-probs of the response at the engine's temperature over the whole
    vocabulary, 0 where the engine does not know them; engine_logp the same, of an engine that is not the training model
    and that knows them.
    """

    text: str
    response_ids: np.ndarray
    logp: np.ndarray
    engine_logp: np.ndarray | None = None


class Engine(Protocol):
    """Anything that answers prompts."""

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt, int64 [P] token ids, in order."""
        ...


class Backend(ABC):
    """Where engines come from. It lives as long as a command, an engine as long as a rollout."""

    @abstractmethod
    def engine(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> AbstractContextManager[Engine]:
        """An engine with the policy's weights, for the length of a `with` block; until it ends they may not change.

        Args:
            policy: who acts.
            config: lengths and batch size.
            generator: source of randomness, on the policy's device.
            temperature: of sampling and of the log-probs, instead of the configuration's.
        """

    def close(self) -> None:  # noqa: B027 - not every backend holds something
        """Give back what it holds."""


class PolicyEngine:
    """What engines that sample as a policy does have in common.

    Args:
        policy: who acts.
        config: lengths. A prompt longer than `max_prompt_tokens` is an error, it is never cut.
        generator: source of randomness, on the policy's device.
        temperature: of sampling and of the log-probs, instead of the configuration's.
    """

    def __init__(
        self, policy: Policy, config: RolloutConfig, generator: torch.Generator, temperature: float | None = None
    ) -> None:
        self.policy = policy
        self.config = config
        self.generator = generator
        self.temperature = config.temperature if temperature is None else temperature

    def seeds(self, count: int) -> list[int]:
        """Seeds for so many requests."""
        device = self.generator.device
        return torch.randint(2**31 - 1, (count,), generator=self.generator, device=device).tolist()


def check_prompts(prompts: Sequence[np.ndarray], texts: Texts, config: RolloutConfig) -> None:
    """Raises ConfigError for a prompt that is empty or too long: it is never cut."""
    for ids in prompts:
        if not 0 < len(ids) <= config.max_prompt_tokens:
            raise ConfigError(
                f"a prompt has {len(ids)} tokens, rollout.max_prompt_tokens={config.max_prompt_tokens} allows"
                f" 1 to that many: {texts.decode([ids])[0][:80]!r}"
            )

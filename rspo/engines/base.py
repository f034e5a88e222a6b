"""The one interface between rollouts and whatever generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(slots=True)
class Generation:
    """A response: its text, and the tokens that training needs.

    response_ids int64 [T]; logp float32 [T], log-probs of the response at the engine's temperature over the whole
    vocabulary.
    """

    text: str
    response_ids: np.ndarray
    logp: np.ndarray


class Engine(Protocol):
    """Anything that answers prompts."""

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Generation]:
        """One response for each prompt, int64 [P] token ids, in order."""
        ...

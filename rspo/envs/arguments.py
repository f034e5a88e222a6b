"""Checks of the arguments that environments have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .wording import PROMPT_STYLES


def check_settings(
    max_turns: int, outcome_scale: float, prompt_style: str, styles: Sequence[str] = PROMPT_STYLES
) -> None:
    """Of a constructor; `styles`: those that the environment has. Raises ValueError that names the one out of range."""
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise ValueError(f"max_turns must be an integer of at least 1; got {max_turns!r}")
    if isinstance(outcome_scale, bool) or not isinstance(outcome_scale, int | float):
        raise ValueError(f"outcome_scale must be a number; got {outcome_scale!r}")
    if not (math.isfinite(outcome_scale) and outcome_scale > 0):
        raise ValueError(f"outcome_scale must be finite and above 0; got {outcome_scale!r}")
    if prompt_style not in styles:
        raise ValueError(f"prompt_style must be one of {', '.join(styles)}; got {prompt_style!r}")


def check_starts(tasks: Sequence[Any], seeds: Sequence[int]) -> None:
    """Of `reset`. Raises ValueError when there are none or the lengths differ, TypeError when a seed is no integer."""
    if len(tasks) == 0:
        raise ValueError("tasks must hold at least one task; got none")
    if len(tasks) != len(seeds):
        raise ValueError(f"seeds must be as many as tasks ({len(tasks)}); got {len(seeds)}")
    for i, seed in enumerate(seeds):
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seeds[{i}] must be an integer; got {seed!r}")


def check_actions(actions: Sequence[str], episodes: int) -> None:
    """Of `step`. Raises TypeError when an action is not a string, ValueError when their number is not that of the
    episodes."""
    if isinstance(actions, str) or not all(isinstance(action, str) for action in actions):
        raise TypeError(f"actions must be a sequence of strings; got {actions!r}")
    if len(actions) != episodes:
        raise ValueError(f"actions must be as many as episodes ({episodes}); got {len(actions)}")

"""Episodes: which environment, how its turns become prompts, and how trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .checks import SWITCHES, Checks

LAYOUTS = ("per_turn", "conversation")
STYLES = ("readable", "verl-agent")


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how its turns become prompts."""

    name: str = "household"
    """A registered name, or the path of a class of one's own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    style: str = "readable"
    """How an environment that has verl-agent's style (`alfworld`, `webshop`) talks where `options` name no
    `prompt_style`: as it does by default ("readable"), or as "verl-agent", the paper's code base. Other environments
    have no such choice."""
    history_length: int = 2
    """(observation, action) pairs that a prompt of the per_turn layout repeats (verl-agent: 2)."""
    layout: str = "per_turn"
    """How a trajectory is laid out for the model: each turn a sample of its own with a prompt made anew ("per_turn",
    the paper), or one growing "conversation", of which only the responses carry loss."""
    workers: int = 0
    """Processes that the episodes are shared out to (`rspo.envs.workers`); 0: none, they run in the trainer's own.
    The number does not change results."""
    worker_timeout: float = 300.0
    """Seconds after which a worker that has not answered is given up."""

    def __post_init__(self) -> None:
        checks = Checks("env", self)
        checks.at_least(0, "workers", "history_length")
        checks.positive("worker_timeout")
        checks.one_of(LAYOUTS, "layout")
        checks.one_of(STYLES, "style")


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled."""

    tasks: int = 16
    """Tasks of one update, B in the paper's Algorithm 1. RSPO replaces a share α of them by replay."""
    group_size: int = 8
    """Trajectories of each task, N."""
    temperature: float = 1.0
    max_prompt_tokens: int = 128
    max_response_tokens: int = 2
    """Household's compact actions are two words."""
    max_batch: int = 512
    """Sequences that the model generates at once."""
    rescore: str = "auto"
    """Take the log-probs of responses from a training forward pass instead of from generation: "on", "off", or "auto":
    where the policy is not float32, whose rounding makes the two differ, so that ratios would not begin at 1. Engines
    other than "transformers" always have it on."""

    def __post_init__(self) -> None:
        checks = Checks("rollout", self)
        checks.at_least(1, "tasks", "group_size", "max_prompt_tokens", "max_response_tokens", "max_batch")
        checks.positive("temperature")
        checks.one_of(SWITCHES, "rescore")

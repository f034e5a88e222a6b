"""The reward swap."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import SCHEDULES, Checks

SAMPLING = ("reward", "random", "variance")
UNITS = ("trajectory", "group")
BUFFER_SOURCES = ("dense", "outcome", "history")
MIXTURES = ("two-means", "pooled")
COPIES = ("device", "offload", "adapter")


@dataclass(frozen=True)
class SwapConfig:
    """The reward swap: agent B, its buffer, and how much of it agent A replays (Algorithm 1, section 4.2)."""

    k: int = 3
    """Updates of B with dense rewards, then of A with outcome rewards, in one loop."""
    alpha: float = 0.125
    """Share of replayed data, and its weight in eq. 1; in [0, 1)."""
    alpha_schedule: str = "constant"
    """α over the run: constant, or decaying to 0 linearly or by a cosine (named as future work in appendix F)."""
    buffer_tasks: int = 28
    """Tasks that B collects, `group_size` trajectories each."""
    source: str = "dense"
    """Who fills the buffer: B after dense updates (RSPO), B after outcome updates ("outcome", RSPO_O), or A's own
    previous loop ("history", RSPO_H)."""
    sampling: str = "reward"
    """Replay the highest rewards first, uniformly at "random", or whole groups by reward "variance"."""
    unit: str = "trajectory"
    """What sampling takes: single trajectories, or whole groups ("variance" always takes groups)."""
    success_only: bool = False
    """Replay fewer trajectories rather than unsuccessful ones."""
    fresh_optimizer: bool = False
    """B starts with a new optimiser instead of a copy of A's state."""
    copy: str = "device"
    """What agent B is. "device": a copy of A's trained weights and optimiser state beside A's own. "offload": the same,
    in A's place, while A's wait in CPU memory. "adapter": a LoRA adapter (section `lora`) on A's weights, which are
    fully trained but stand still while B acts and learns; its optimiser is new. Under `lora.rank` > 0 with "device"
    both agents are adapters on one frozen base."""
    ignore_behavior: bool = False
    """Treat replayed tokens as if A had written them: ratio to π_old and clip centre 1, whoever sampled them."""
    mixture: str = "two-means"
    """"two-means": (1 - α)·mean of the on-policy terms + α·mean of the replayed terms (eq. 1); "pooled": one mean."""

    def __post_init__(self) -> None:
        checks = Checks("swap", self)
        checks.at_least(1, "k", "buffer_tasks")
        checks.fraction("alpha", below_one=True)
        checks.one_of(SCHEDULES, "alpha_schedule")
        checks.one_of(BUFFER_SOURCES, "source")
        checks.one_of(SAMPLING, "sampling")
        checks.one_of(UNITS, "unit")
        checks.one_of(MIXTURES, "mixture")
        checks.one_of(COPIES, "copy")

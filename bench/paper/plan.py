"""What is run: methods, ablations, starts and seeds, fixed here before any of it was.

Seeds are part of the plan, and none is left out of a table: `PAPER_SEEDS` are the paper's, `FRESH_SEEDS` were chosen
before the first run with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rspo.config import Config, default_config, measured_start
from rspo.config.files import apply_flags

PAPER_SEEDS = (0, 200, 400)
FRESH_SEEDS = (1001, 1002, 1003, 1004, 1005)
STEPS = 54
EQUAL_TRAJECTORIES = 126
"""Updates of a plain method that sample as many trajectories as 54 A-updates under RSPO: 54·896/384."""

EVERY_RUN = ("evaluation.temperatures=[1.0]", "evaluation.transcripts=0")
STARTS = {
    "1.2 %": ("warmup.band=[0.010, 0.015]", "warmup.held_out_band=[0.005, 0.015]"),
    "0.6 %": ("warmup.band=[0.004, 0.008]", "warmup.held_out_band=[0.002, 0.010]"),
}
"""Start policies by their success rate on training tasks, and the warm-up's settings for them."""
MAIN_SEEDS = {"1.2 %": PAPER_SEEDS, "0.6 %": FRESH_SEEDS}
"""Of the main comparison and what is set beside it, by start. The clip centres have fresh seeds at both."""


@dataclass(frozen=True)
class Spec:
    """One run.

    method, base, flags: its configuration, laid over the default preset.
    start: a key of STARTS.  seed: of everything random, the start policy's warm-up included.
    """

    method: str
    base: str
    start: str
    seed: int
    steps: int = STEPS
    flags: tuple[str, ...] = ()

    @property
    def settings(self) -> list[str]:
        """Flags of the run, less the start policy's path."""
        return [f"run.seed={self.seed}", f"run.steps={self.steps}", *EVERY_RUN, *self.flags]

    @property
    def key(self) -> str:
        """A name for files and records; the same settings have the same."""
        parts = [self.method, self.base if self.method == "rspo" else "", self.start, self.settings]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
        method = f"rspo-{self.base}" if self.method == "rspo" else self.method
        changed = [flag.partition(".")[2] for flag in self.flags]
        return "_".join([method, *changed, f"start{self.start[:3]}", f"seed{self.seed}", digest])

    @property
    def start_name(self) -> str:
        return f"{self.start[:3]}-{self.seed}"

    @property
    def start_config(self) -> Config:
        return apply_flags(measured_start(default_config()), [f"run.seed={self.seed}", *STARTS[self.start]])

    def config(self, start: Path) -> Config:
        return apply_flags(default_config(self.method, self.base), [*self.settings, f"policy.path={start}"])

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    def head(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "flags": list(values["flags"])}


# The loss of replayed tokens: the paper's unbounded shift, and what bounds or drops it.
CENTERS = {
    "shift (paper)": ("loss.center_cap=null",),
    "none": ("loss.center_cap=null", "loss.clip_center=none"),
    "center_cap=1 (default)": (),
    "weight_cap=1": ("loss.center_cap=null", "loss.weight_cap=1.0"),
    "behaviour ignored": ("loss.center_cap=null", "swap.ignore_behavior=true"),
}
MAIN = {
    "GRPO": ("grpo", "grpo"),
    "RSPO+GRPO": ("rspo", "grpo"),
    "GiGPO": ("gigpo", "grpo"),
    "RSPO+GiGPO": ("rspo", "gigpo"),
    "PPO": ("ppo", "grpo"),
    "RSPO+PPO": ("rspo", "ppo"),
}
DENSE_ONLY = ("rewards.train=dense",)
ABLATIONS = {
    "sampling=random": ("swap.sampling=random",),
    "sampling=variance": ("swap.sampling=variance",),
    "RSPO_H": ("swap.source=history",),
    "RSPO_O": ("swap.source=outcome",),
    "α=1/16": ("swap.alpha=0.0625",),
    "α=1/4": ("swap.alpha=0.25",),
    "α=1/2": ("swap.alpha=0.5",),
    "k=1": ("swap.k=1",),
    "k=5": ("swap.k=5",),
    "k=10": ("swap.k=10",),
    "σ=0.1": ("rewards.dense_noise=0.1",),
    "σ=0.3": ("rewards.dense_noise=0.3",),
}
"""Of RSPO+GRPO; its plain run has sampling=reward, source B, α = 1/8, k = 3, σ = 0."""


def main_runs(start: str) -> Iterator[Spec]:
    """The main comparison. A plain method goes on until it has sampled as many trajectories as RSPO: its first 54
    updates are those of the shorter run, since nothing in it depends on its length."""
    for seed in MAIN_SEEDS[start]:
        for method, base in MAIN.values():
            yield Spec(method, base, start, seed, STEPS if method == "rspo" else EQUAL_TRAJECTORIES)


def center_runs(start: str, seeds: tuple[int, ...]) -> Iterator[Spec]:
    """The clip centre of replayed tokens."""
    for seed in seeds:
        for flags in CENTERS.values():
            yield Spec("rspo", "grpo", start, seed, flags=flags)


def plan() -> list[Spec]:
    """Every run, the main comparison first."""
    specs = [*main_runs("1.2 %"), *main_runs("0.6 %")]
    for seed in MAIN_SEEDS["1.2 %"]:
        specs.append(Spec("grpo", "grpo", "1.2 %", seed, flags=DENSE_ONLY))
        specs += [Spec("rspo", "grpo", "1.2 %", seed, flags=flags) for flags in ABLATIONS.values()]
    for start in STARTS:
        specs += center_runs(start, FRESH_SEEDS)
    return _distinct(specs)


def quick_plan() -> list[Spec]:
    """One seed and 9 updates of everything, to see that it runs; its numbers say nothing."""
    return _distinct([replace(spec, seed=0, steps=9) for spec in plan() if spec.start == "1.2 %"])


def _distinct(specs: list[Spec]) -> list[Spec]:
    """Without those that are asked for twice."""
    return list({spec.key: spec for spec in specs}.values())

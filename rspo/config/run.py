"""A run as a whole: its length and records, its processes, its evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import Checks, ConfigError, one_of, positive

SHARDS = ("none", "fsdp")
REPORTERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class ParallelConfig:
    """Several processes of one run, started by `accelerate launch` or `torchrun` (`rspo.models.processes`)."""

    processes: int | None = None
    """How many the run needs; with another number it does not begin. None: as many as were started."""
    shard: str = "none"
    """What of the model each process holds: the whole ("none"), or with FSDP2 its share of the weights, gradients and
    optimiser states ("fsdp")."""

    def __post_init__(self) -> None:
        checks = Checks("parallel", self)
        checks.at_least(1, "processes", or_none=True)
        checks.one_of(SHARDS, "shard")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation during training and by `rspo eval`."""

    every: int = 9
    """A-updates between evaluations; 0: only before and after."""
    episodes: int = 512
    """At each temperature, the same ones every time."""
    temperatures: tuple[float, ...] = (1.0, 0.4)
    """Sampling temperatures. The first is the main one: its success rate is the record's plain `success`, that of
    another T is `success@T`."""
    split: str = "eval"
    """Of the environment's tasks: every environment has "train" and "eval", some have more."""
    transcripts: int = 4
    """Episodes of each evaluation that are written out as text, the same ones every time; 0: none."""

    def __post_init__(self) -> None:
        checks = Checks("evaluation", self)
        checks.at_least(0, "every", "transcripts")
        checks.at_least(1, "episodes")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"evaluation.temperatures must be one or more different numbers, got {self.temperatures}")
        for temperature in self.temperatures:
            positive("evaluation.temperatures", temperature)


@dataclass(frozen=True)
class RunConfig:
    """Length, seed and record keeping of a run."""

    seed: int = 0
    steps: int = 54
    """Updates of agent A."""
    save_every: int = 9
    """A-updates between checkpoints, rounded up to the end of a loop; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    threads: int | None = 1
    """CPU threads of PyTorch. One suits the tiny model, whose tensors are too small to share out, and makes results
    independent of the number of cores; None leaves the choice to PyTorch, for larger models on a CPU."""
    reproducible: bool = True
    """With `threads=1`, ask MKL for matrix products whose last bits do not depend on where in memory tensors lie, so
    that a run on the CPU repeats bit for bit. An MKL_CBWR in the environment is left as it is."""
    report_to: tuple[str, ...] = ()
    """Where records go besides `metrics.jsonl`: "tensorboard", "wandb", "trackio", or the class path
    "package.module:Class" of an `rspo.runs.reporters.Reporter` of one's own."""
    report_online: bool = False
    """Let "wandb" send records to its server as they come, and "trackio" ask the Hugging Face Hub for the user's name;
    without it both stay on this machine, unless their own environment variables say otherwise."""

    def __post_init__(self) -> None:
        checks = Checks("run", self)
        checks.at_least(0, "seed", "save_every")
        checks.at_least(1, "steps", "keep")
        checks.at_least(1, "threads", or_none=True)
        for name in self.report_to:
            if ":" not in name:
                one_of("run.report_to", name, REPORTERS)

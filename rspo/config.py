"""Every setting of a run as a field of a dataclass, checked when it is made.

Two presets: `default_config`, at the scale of the embedded household environment, and `paper_config`, every setting
as in the RSPO paper (arXiv 2607.04713, appendix A) and the code base that it was built on (verl-agent).
`rspo.config_io` reads and writes them as YAML and applies `section.field=value` flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rspo_kernels import PolicyLossConfig

METHODS = ("rspo", "grpo")
ESTIMATORS = ("grpo",)
SAMPLING = ("reward", "random", "variance")
UNITS = ("trajectory", "group")
BUFFER_SOURCES = ("dense", "outcome", "history")
MIXTURES = ("two-means", "pooled")
ALPHA_SCHEDULES = ("constant", "linear", "cosine")
TRAIN_REWARDS = ("outcome", "dense")
SINGLETONS = ("zero", "raw")
ATTENTION = ("sdpa", "eager", "flash_attention_2")
DTYPES = ("float32", "bfloat16", "float16")
SPLITS = ("train", "eval")


class ConfigError(ValueError):
    """A setting that is unknown or impossible; the message names what is allowed."""


@dataclass(frozen=True)
class EnvConfig:
    """Which environment, and how its turns become prompts."""

    name: str = "household"
    """A registered name, or the path of a class of one's own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    history_length: int = 2
    """(observation, action) pairs that a prompt repeats (verl-agent: 2)."""

    def __post_init__(self) -> None:
        _at_least("env.history_length", self.history_length, 0)


@dataclass(frozen=True)
class PolicyConfig:
    """The causal language model that acts."""

    path: str | None = None
    """Folder of a saved transformers model. None: a tiny model for household, warmed up by behaviour cloning."""
    dtype: str = "float32"
    attention: str = "sdpa"
    device: str = "cpu"
    allow_download: bool = False
    """Let transformers fetch a model that `path` names on a hub; otherwise nothing is read but local files."""

    def __post_init__(self) -> None:
        _one_of("policy.dtype", self.dtype, DTYPES)
        _one_of("policy.attention", self.attention, ATTENTION)


@dataclass(frozen=True)
class WarmupConfig:
    """Behaviour cloning of the tiny model to a start policy that seldom succeeds (`rspo.warmup`).

    The start matters: at 0.2 % nothing is learned from outcomes, at 3 % all methods look alike.
    """

    trajectories: int = 2500
    expert_rate: float = 0.5
    """Probability that a step of a demonstration is the expert's; otherwise it is random."""
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    batch_rows: int = 256
    max_updates: int = 800
    check_every: int = 20
    """Updates between two measurements of the success rate."""
    check_episodes: int = 2048
    """Episodes of training tasks in a measurement; an eighth of them first, and all only if that reaches the band."""
    band: tuple[float, float] = (0.010, 0.015)
    """Success rate of the start policy on training tasks, at the rollout temperature."""
    held_out_band: tuple[float, float] = (0.005, 0.015)
    """The same on the held-out episodes of evaluations; wider, because those are fewer."""

    def __post_init__(self) -> None:
        _fraction("warmup.expert_rate", self.expert_rate)
        for name in ("trajectories", "batch_rows", "max_updates", "check_every", "check_episodes"):
            _at_least(f"warmup.{name}", getattr(self, name), 1)
        _positive("warmup.learning_rate", self.learning_rate)
        _betas("warmup.betas", self.betas)
        for name in ("band", "held_out_band"):
            band = getattr(self, name)
            if len(band) != 2 or not 0 <= band[0] < band[1] <= 1:
                raise ConfigError(f"warmup.{name} must be (low, high) with 0 <= low < high <= 1, got {band}")


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

    def __post_init__(self) -> None:
        for name in ("tasks", "group_size", "max_prompt_tokens", "max_response_tokens", "max_batch"):
            _at_least(f"rollout.{name}", getattr(self, name), 1)
        _positive("rollout.temperature", self.temperature)


@dataclass(frozen=True)
class EstimatorConfig:
    """Advantages."""

    name: str = "grpo"
    std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO."""
    rows: bool = False
    """Statistics over the turns' rows, as verl-agent takes them, instead of over trajectories."""
    singleton: str = "zero"
    """Advantage of a group of one: 0, or the "raw" score."""
    invalid_penalty: float = 0.0
    """Taken off the reward of a turn whose action was invalid, and off no other turn (the paper: 0.1). Off for the
    tiny household model: while nearly all groups fail it is the only signal, and Adam makes any signal a large step,
    towards actions that are always accepted and lead nowhere."""

    def __post_init__(self) -> None:
        _one_of("estimator.name", self.name, ESTIMATORS)
        _one_of("estimator.singleton", self.singleton, SINGLETONS)
        _at_least("estimator.invalid_penalty", self.invalid_penalty, 0)


@dataclass(frozen=True)
class RewardConfig:
    """Which rewards train, and where dense ones come from."""

    train: str = "outcome"
    """Rewards of method "grpo"; "dense" shows reward hacking (the paper's Figure 3)."""
    dense: str = "environment"
    """"environment", or "package.module:function" that maps a Trajectory to one number per turn."""
    dense_scale: float = 1.0
    dense_noise: float = 0.0
    """Standard deviation of Gaussian noise on each turn's dense reward (the paper's Table 5)."""

    def __post_init__(self) -> None:
        _one_of("rewards.train", self.train, TRAIN_REWARDS)
        if self.dense != "environment" and ":" not in self.dense:
            raise ConfigError(f"rewards.dense must be 'environment' or 'package.module:function', got {self.dense!r}")
        _positive("rewards.dense_scale", self.dense_scale)
        _at_least("rewards.dense_noise", self.dense_noise, 0)


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
    mixture: str = "two-means"
    """"two-means": (1 - α)·mean of the on-policy terms + α·mean of the replayed terms (eq. 1); "pooled": one mean."""

    def __post_init__(self) -> None:
        _at_least("swap.k", self.k, 1)
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"swap.alpha must be in [0, 1), got {self.alpha}")
        _one_of("swap.alpha_schedule", self.alpha_schedule, ALPHA_SCHEDULES)
        _at_least("swap.buffer_tasks", self.buffer_tasks, 1)
        _one_of("swap.source", self.source, BUFFER_SOURCES)
        _one_of("swap.sampling", self.sampling, SAMPLING)
        _one_of("swap.unit", self.unit, UNITS)
        _one_of("swap.mixture", self.mixture, MIXTURES)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the mini-batches of an update (one pass over its data)."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    minibatches: int = 4
    """Optimiser steps of an update."""
    minibatch_rows: int | None = None
    """Turns in a mini-batch; overrides `minibatches`."""
    micro_batch_tokens: int = 16384
    """Padded tokens in one forward pass; the gradient does not depend on it."""

    def __post_init__(self) -> None:
        _at_least("optimizer.learning_rate", self.learning_rate, 0)
        _positive("optimizer.grad_clip", self.grad_clip)
        _at_least("optimizer.weight_decay", self.weight_decay, 0)
        _at_least("optimizer.minibatches", self.minibatches, 1)
        _at_least("optimizer.micro_batch_tokens", self.micro_batch_tokens, 1)
        if self.minibatch_rows is not None:
            _at_least("optimizer.minibatch_rows", self.minibatch_rows, 1)
        _betas("optimizer.betas", self.betas)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation during training and by `rspo eval`."""

    every: int = 9
    """A-updates between evaluations; 0: only before and after."""
    episodes: int = 512
    temperature: float = 1.0
    split: str = "eval"

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 0)
        _at_least("evaluation.episodes", self.episodes, 1)
        _positive("evaluation.temperature", self.temperature)
        _one_of("evaluation.split", self.split, SPLITS)


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

    def __post_init__(self) -> None:
        _at_least("run.seed", self.seed, 0)
        _at_least("run.steps", self.steps, 1)
        _at_least("run.save_every", self.save_every, 0)
        _at_least("run.keep", self.keep, 1)
        if self.threads is not None:
            _at_least("run.threads", self.threads, 1)


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises ConfigError for what cannot work together."""

    method: str = "rspo"
    """"rspo", or "grpo": the same trainer without agent B and replay."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(center_cap=1.0))
    """The policy loss. The default bounds the clip centre of replayed tokens by 1; the paper's is unbounded."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        if self.estimator.name == "grpo" and self.rollout.group_size < 2 and self.estimator.singleton == "zero":
            raise ConfigError(
                "rollout.group_size must be >= 2 with estimator.name='grpo': a group of one has no baseline"
                f" (got {self.rollout.group_size}; estimator.singleton='raw' would train on raw scores)"
            )
        if self.loss.aggregation == "seq-mean-token-sum-norm" and self.loss.horizon is None:
            raise ConfigError(f"loss.horizon must be given with loss.aggregation={self.loss.aggregation!r}, got None")
        if self.method == "rspo":
            self._check_swap()

    def _check_swap(self) -> None:
        if self.rewards.train != "outcome":
            raise ConfigError("rewards.train must be 'outcome' with method='rspo': agent A is always trained on it")
        if self.swap.alpha > 0 and self.on_policy_tasks(self.swap.alpha) < 1:
            raise ConfigError(
                f"swap.alpha={self.swap.alpha} leaves no on-policy task of rollout.tasks={self.rollout.tasks};"
                " lower alpha or raise rollout.tasks"
            )

    def on_policy_tasks(self, alpha: float) -> int:
        """Tasks that are rolled out for one update when a share alpha is replayed: (1 - α)·B."""
        return self.rollout.tasks - round(alpha * self.rollout.tasks)

    def replay_size(self, alpha: float) -> int:
        """Trajectories replayed in one update of A: α·B·N."""
        return round(alpha * self.rollout.tasks * self.rollout.group_size)

    def alpha_at(self, step: int) -> float:
        """α at an update of A, counted from 0."""
        progress = step / self.run.steps
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[self.swap.alpha_schedule]
        return self.swap.alpha * factor


def default_config(method: str = "rspo") -> Config:
    """Settings at household's scale, with the clip centre of replayed tokens bounded by 1."""
    return Config(method=method)


def paper_config(method: str = "rspo") -> Config:
    """Every setting as in the paper (ALFWorld where the environments differ), with its unbounded shifted centre."""
    return Config(
        method=method,
        rollout=RolloutConfig(max_prompt_tokens=2048, max_response_tokens=512, max_batch=128),
        estimator=EstimatorConfig(invalid_penalty=0.1),
        loss=PolicyLossConfig(
            clip_low=0.2,
            clip_high=0.2,
            clip_center="shift",
            center_cap=None,
            dual_clip=3.0,
            kl_coef=0.01,
            kl_estimator="k3",
            entropy_coef=0.001,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-6, weight_decay=0.01, grad_clip=1.0, minibatch_rows=256, micro_batch_tokens=65536
        ),
        evaluation=EvaluationConfig(every=5, episodes=128, temperature=0.4),
        run=RunConfig(steps=150, save_every=15, threads=None),
    )


PRESETS = {"default": default_config, "paper": paper_config}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _at_least(name: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ConfigError(f"{name} must be >= {low}, got {value}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be > 0, got {value}")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be in [0, 1], got {value}")


def _betas(name: str, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ConfigError(f"{name} must be two numbers in [0, 1), got {value}")

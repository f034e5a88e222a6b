"""Every setting of a run as a field of a dataclass, checked when it is made.

Two presets: `default_config`, at the scale of the embedded household environment, and `paper_config`, every setting
as in the RSPO paper (arXiv 2607.04713, appendix A) and the code base that it was built on (verl-agent).
`rspo.config.files` reads and writes them as YAML and applies `section.field=value` flags.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rspo_kernels import PolicyLossConfig

from .sections import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    METHODS,
    AdapterConfig,
    ConfigError,
    CriticConfig,
    EngineConfig,
    EnvConfig,
    EstimatorConfig,
    EvaluationConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    RunConfig,
    SwapConfig,
    WarmupConfig,
)


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises ConfigError for what cannot work together."""

    method: str = "rspo"
    """"rspo", or an estimator's name for the same trainer without agent B and replay."""
    base: str = "grpo"
    """Under "rspo": the estimator of both agents' advantages. A name, or the class path "package.module:Class" of an
    `rspo.algorithm.estimators.Estimator` of one's own (as for `method`)."""
    env: EnvConfig = field(default_factory=EnvConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(
        default_factory=lambda: RewardModelConfig(epochs=8, batch_size=32, learning_rate=1e-3, warmup_updates=20)
    )
    """Of a tiny model; SPA-RL's settings for a pre-trained one are the paper preset's."""
    swap: SwapConfig = field(default_factory=SwapConfig)
    loss: PolicyLossConfig = field(default_factory=lambda: PolicyLossConfig(center_cap=1.0))
    """The policy loss. The default bounds the clip centre of replayed tokens by 1; the paper's is unbounded."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        known_estimator(self.base, "base", ESTIMATORS)
        known_estimator(self.method, "method", METHODS)
        name = self.estimator_name
        if name in GROUP_ESTIMATORS and self.rollout.group_size < 2 and self.estimator.singleton == "zero":
            raise ConfigError(
                f"rollout.group_size must be >= 2 with {name!r}: a group of one has no baseline"
                f" (got {self.rollout.group_size}; estimator.singleton='raw' would train on raw scores)"
            )
        if name == "rloo" and self.estimator.rows:
            raise ConfigError(
                "estimator.rows must be false with 'rloo', got true: the other rows of a group are in part one's own"
            )
        if self.loss.aggregation == "seq-mean-token-sum-norm" and self.loss.horizon is None:
            raise ConfigError(f"loss.horizon must be given with loss.aggregation={self.loss.aggregation!r}, got None")
        self._check_engine()
        self._check_copies()
        if self.method == "rspo":
            self._check_swap()

    @property
    def estimator_name(self) -> str:
        """Who makes the advantages: `base` under RSPO, else `method`."""
        return self.base if self.method == "rspo" else self.method

    @property
    def title(self) -> str:
        """The method as the paper writes it, e.g. "RSPO+GRPO"."""
        name = {"gigpo": "GiGPO"}.get(self.estimator_name, self.estimator_name.rpartition(":")[2].upper())
        return f"RSPO+{name}" if self.method == "rspo" else name

    def _check_engine(self) -> None:
        if self.engine.name != "transformers" and self.rollout.rescore == "off":
            raise ConfigError(
                f"rollout.rescore must not be 'off' with engine.name={self.engine.name!r}: its log-probs are not the"
                " training model's"
            )
        if self.engine.importance_cap is not None and not self.rescores:
            raise ConfigError(
                f"engine.importance_cap={self.engine.importance_cap} needs log-probs of the training model beside the"
                f" engine's: rollout.rescore must be 'on', got {self.rollout.rescore!r}"
            )

    @property
    def adapts_both(self) -> bool:
        """Whether every agent is a LoRA adapter on the frozen start policy; else agent A is fully trained."""
        return self.lora.rank > 0 and self.swap.copy != "adapter"

    def _check_copies(self) -> None:
        rank = self.lora.rank
        if self.swap.copy == "adapter" and rank == 0:
            raise ConfigError("lora.rank must be > 0 with swap.copy='adapter': the size of agent B's adapter; got 0")
        if self.swap.copy == "adapter" and self.method != "rspo":
            raise ConfigError(f"swap.copy='adapter' needs an agent B, which method={self.method!r} does not have")
        if self.parallel.shard != "none" and (rank > 0 or self.swap.copy != "device"):
            raise ConfigError(
                f"parallel.shard must be 'none' with lora.rank={rank} and swap.copy={self.swap.copy!r}, got"
                f" {self.parallel.shard!r}: only whole models are sharded, with agent B as a copy beside agent A"
            )
        if self.swap.copy == "offload" and rank > 0:
            raise ConfigError(
                f"swap.copy must be 'device' with lora.rank={rank}, got 'offload': both agents are adapters on one"
                " base, and nothing of size is left to move away"
            )

    def _check_swap(self) -> None:
        if self.rewards.train != "outcome":
            raise ConfigError("rewards.train must be 'outcome' with method='rspo': agent A is always trained on it")
        if self.swap.alpha > 0 and self.on_policy_tasks(self.swap.alpha) < 1:
            raise ConfigError(
                f"swap.alpha={self.swap.alpha} leaves no on-policy task of rollout.tasks={self.rollout.tasks};"
                " lower alpha or raise rollout.tasks"
            )

    @property
    def rescores(self) -> bool:
        """Whether log-probs of responses are taken from training forward passes."""
        differ = self.policy.dtype != "float32" or self.engine.name != "transformers"
        return self.rollout.rescore == "on" or (self.rollout.rescore == "auto" and differ)

    def on_policy_tasks(self, alpha: float) -> int:
        """Tasks that are rolled out for one update when a share alpha is replayed: (1 - α)·B."""
        return self.rollout.tasks - round(alpha * self.rollout.tasks)

    def replay_size(self, alpha: float) -> int:
        """Trajectories replayed in one update of A: α·B·N."""
        return round(alpha * self.rollout.tasks * self.rollout.group_size)

    @property
    def without_replay(self) -> str:
        """What to say where RSPO's replay rounds to nothing from the start, so that it is the base method alone; empty
        where it does not."""
        if self.method != "rspo" or self.swap.alpha == 0 or self.replay_size(self.swap.alpha) > 0:
            return ""
        rollout = self.rollout
        share = self.swap.alpha * rollout.tasks * rollout.group_size
        return (
            f"swap.alpha={self.swap.alpha:g} of rollout.tasks={rollout.tasks} × rollout.group_size={rollout.group_size}"
            f" is {share:g} trajectories, rounded to none: nothing is replayed, this is {self.base} alone"
        )

    def alpha_at(self, step: int) -> float:
        """α at an update of A, counted from 0."""
        return self.swap.alpha * decay(self.swap.alpha_schedule, step / self.run.steps)

    def learning_rate_factor(self, step: int) -> float:
        """What the learning rates are multiplied by at an update, counted from 0. Agent B's go on from A's where it was
        copied; where its loop is longer than what is left of the run, at the last one's."""
        warmup, step = self.optimizer.warmup_updates, min(step, self.run.steps - 1)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return decay(self.optimizer.schedule, (step - warmup) / max(self.run.steps - warmup, 1))


def decay(schedule: str, progress: float) -> float:
    """From 1 down to 0 as progress goes from 0 to 1; "constant" stays at 1."""
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[schedule]


def known_estimator(value: str, name: str, allowed: tuple[str, ...]) -> None:
    """Check the name of an estimator, or a class path, which is imported only when it is made."""
    if value not in allowed and ":" not in value:
        names = ", ".join(map(repr, allowed))
        raise ConfigError(f"{name} must be one of {names}, or a class path 'package.module:Class', got {value!r}")


def default_config(method: str = "rspo", base: str = "grpo") -> Config:
    """Settings at household's scale, with the clip centre of replayed tokens bounded by 1."""
    config = Config(method=method, base=base)
    return _ungrouped(config) if config.estimator_name == "ppo" else config


def measured_start(config: Config) -> Config:
    """With the warm-up of the runs in docs/reproduction.md: the small model is cloned until 1 to 1.5 % of its episodes
    succeed."""
    measured = WarmupConfig(
        width=config.warmup.width,
        layers=config.warmup.layers,
        trajectories=2500,
        expert_rate=0.5,
        batch_rows=256,
        max_updates=800,
        check_every=20,
        check_episodes=2048,
        band=(0.010, 0.015),
        held_out_band=(0.005, 0.015),
    )
    return replace(config, warmup=measured)


def _ungrouped(config: Config) -> Config:
    """As many trajectories, each of a task of its own (the paper's PPO): a critic needs no group."""
    size = config.rollout.group_size
    return replace(
        config,
        rollout=replace(config.rollout, tasks=config.rollout.tasks * size, group_size=1),
        swap=replace(config.swap, buffer_tasks=config.swap.buffer_tasks * size),
    )


def paper_config(method: str = "rspo", base: str = "grpo") -> Config:
    """Every setting as in the paper (ALFWorld where the environments differ), with its unbounded shifted centre."""
    return replace(
        default_config(method, base),
        env=EnvConfig(style="verl-agent"),
        policy=PolicyConfig(chat="on", gradient_checkpointing=True),
        rollout=replace(
            default_config(method, base).rollout, max_prompt_tokens=2048, max_response_tokens=512, max_batch=128
        ),
        estimator=EstimatorConfig(invalid_penalty=0.1, invalid_penalty_on="format"),
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
        critic=CriticConfig(learning_rate=1e-5),
        reward_model=RewardModelConfig(),
        evaluation=EvaluationConfig(every=5, episodes=128, temperatures=(0.4,)),
        run=RunConfig(steps=150, save_every=15, threads=None),
    )


PRESETS = {"default": default_config, "paper": paper_config}


__all__ = [
    "ESTIMATORS",
    "METHODS",
    "PRESETS",
    "AdapterConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "EngineConfig",
    "EnvConfig",
    "EstimatorConfig",
    "EvaluationConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PolicyConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SwapConfig",
    "WarmupConfig",
    "default_config",
    "paper_config",
]

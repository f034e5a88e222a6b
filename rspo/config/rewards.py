"""Rewards, and the model that dense ones may come from."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import Checks, ConfigError

TRAIN_REWARDS = ("outcome", "dense")
TARGETS = ("task_score", "won")
LEARNED_REWARD_SCALE = 10.0


@dataclass(frozen=True)
class RewardConfig:
    """Which rewards train, and where dense ones come from."""

    train: str = "outcome"
    """Rewards of every method but "rspo"; "dense" shows reward hacking (the paper's Figure 3)."""
    dense: str = "environment"
    """"environment", "model:FOLDER" of a process reward model (`rspo reward-model`), or "package.module:function" that
    maps a Trajectory to one number per turn."""
    dense_scale: float | None = None
    """Factor on dense rewards. None: 10 for a reward model, whose total is about 1 for a success, so that dense returns
    have the scale of outcomes; 1 for the others."""
    dense_noise: float = 0.0
    """Standard deviation of Gaussian noise on each turn's dense reward before the scale (the paper's Table 5)."""

    def __post_init__(self) -> None:
        checks = Checks("rewards", self)
        checks.one_of(TRAIN_REWARDS, "train")
        if self.dense != "environment" and not all(self.dense.partition(":")):
            raise ConfigError(
                f"rewards.dense must be 'environment', 'model:FOLDER' or 'package.module:function', got {self.dense!r}"
            )
        checks.positive("dense_scale", or_none=True)
        checks.at_least(0, "dense_noise")

    @property
    def model_path(self) -> str | None:
        """Folder of the process reward model, where dense rewards come from one."""
        kind, _, path = self.dense.partition(":")
        return path if kind == "model" else None

    @property
    def scale(self) -> float:
        """The factor that `dense_scale` stands for."""
        if self.dense_scale is not None:
            return self.dense_scale
        return 1.0 if self.model_path is None else LEARNED_REWARD_SCALE


@dataclass(frozen=True)
class RewardModelConfig:
    """Training of a process reward model (`rspo.runs.reward_training`).

    The defaults are SPA-RL's, for a pre-trained model of a few billion weights.
    """

    target: str = "task_score"
    """What the turns' rewards should add up to, in [0, 1]: "task_score", or "won"."""
    epochs: int = 1
    batch_size: int = 16
    """Trajectories of an update."""
    learning_rate: float = 3e-6
    weight_decay: float = 0.01
    warmup_updates: int = 500
    """Updates over which the learning rate rises from 0; then it stays."""
    grad_clip: float = 1.0
    """Largest norm of the gradient."""
    head_width: int | None = None
    """Hidden units of the MLP; None: as many as the model's hidden states have numbers."""
    max_tokens: int | None = None
    """Longest conversation that is read in one piece; None: as long as the model can read."""
    held_out: float = 0.1
    """Share of the trajectories that is not trained on, and measured instead."""
    micro_batch_tokens: int = 16384
    """Tokens in one forward pass, padding included; a conversation is never split between two."""
    bf16: bool = True
    """Train in bfloat16 on a GPU that can; weights and Adam's state stay float32."""

    def __post_init__(self) -> None:
        checks = Checks("reward_model", self)
        checks.one_of(TARGETS, "target")
        checks.at_least(1, "epochs", "batch_size", "micro_batch_tokens")
        checks.positive("learning_rate", "grad_clip")
        checks.at_least(0, "weight_decay", "warmup_updates")
        checks.at_least(1, "head_width", or_none=True)
        checks.at_least(2, "max_tokens", or_none=True)
        checks.fraction("held_out", below_one=True)

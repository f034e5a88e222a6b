"""Advantages, and the value function that PPO takes them from."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import Checks, ConfigError

ESTIMATORS = ("grpo", "rloo", "gigpo", "ppo", "reinforce++")
METHODS = ("rspo", *ESTIMATORS)
GROUP_ESTIMATORS = ("grpo", "rloo", "gigpo")
GAE_LEVELS = ("trajectory", "turn", "token")
BACKBONES = ("own", "shared")
SINGLETONS = ("zero", "raw")
INVALID_TURNS = ("format", "refused")


@dataclass(frozen=True)
class EstimatorConfig:
    """Advantages; which estimator is `method`, or under RSPO `base`."""

    std: bool = True
    """GRPO, GiGPO: divide by the group's standard deviation. False: Dr. GRPO, and GiGPO's mean_norm."""
    rows: bool = False
    """GRPO, GiGPO: statistics over the turns' rows, as verl-agent takes them, instead of over trajectories. Not with an
    `invalid_penalty`: in a group of one outcome penalties are all that differs, and the deviation makes them as large
    as an outcome."""
    singleton: str = "zero"
    """Advantage of a group of one: 0, or the "raw" score."""
    invalid_penalty: float = 0.0
    """Taken off the reward of a turn that was invalid, and off no other turn (the paper: 0.1). Off for the
    tiny household model: while nearly all groups fail it is the only signal, and Adam makes any signal a large step,
    towards actions that are always accepted and lead nowhere."""
    invalid_penalty_on: str = "refused"
    """Turns that pay `invalid_penalty`: "format", responses that were badly formed (the paper's code base: tags
    missing, Chinese letters), whatever the environment made of their action; "refused", also those whose action the
    environment refused."""
    gamma: float | None = None
    """Discount. None: 0.95 for GiGPO's step returns, 1 for PPO and REINFORCE++."""
    step_weight: float = 1.0
    """GiGPO: weight of the step level."""
    similarity: float | None = None
    """GiGPO: observations at least this similar (difflib's ratio) are one state; None: equal ones are."""
    lam: float = 0.95
    """PPO: λ of GAE."""
    level: str = "trajectory"
    """PPO: GAE over a trajectory's tokens, from a turn's last token on to the next turn's first ("trajectory"), over
    its turns, one value each ("turn"), or inside each turn, which gets the trajectory's total reward ("token", as
    verl-agent)."""
    whiten: bool = True
    """PPO: advantages of an update's batch with mean 0 and deviation 1."""
    bootstrap: bool = False
    """PPO: a truncated trajectory goes on with the critic's value of the state it was cut off in. False: it ends with
    0, which makes the turn limit part of the task. Without a discount, and with most trajectories truncated, a value
    that is its own target has nothing to hold it: on household it drifts until the policy collapses."""

    def __post_init__(self) -> None:
        checks = Checks("estimator", self)
        checks.one_of(SINGLETONS, "singleton")
        checks.at_least(0, "invalid_penalty", "step_weight")
        checks.one_of(INVALID_TURNS, "invalid_penalty_on")
        checks.fraction("gamma", or_none=True)
        checks.fraction("lam")
        checks.one_of(GAE_LEVELS, "level")
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ConfigError(f"estimator.similarity must be in (0, 1] or null, got {self.similarity}")


@dataclass(frozen=True)
class CriticConfig:
    """PPO's value function."""

    backbone: str = "own"
    """A body of its own, which starts as a copy of the policy's, or one "shared" with the policy, where the value loss
    trains both."""
    learning_rate: float = 1e-3
    """Of a critic with a body of its own, AdamW; a shared one is trained with the policy."""
    value_clip: float | None = 0.5
    """Values may move this far from those before the update before the loss stops pulling; None: no limit."""
    coef: float = 0.5
    """Weight of the value loss beside the policy loss, where the body is shared."""

    def __post_init__(self) -> None:
        checks = Checks("critic", self)
        checks.one_of(BACKBONES, "backbone")
        checks.at_least(0, "learning_rate", "coef")
        checks.positive("value_clip", or_none=True)

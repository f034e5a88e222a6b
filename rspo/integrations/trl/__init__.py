"""RSPO inside TRL: the fused loss in GRPOTrainer, the reward swap on top of it, and environments as tools.

Needs `pip install rspo[trl]`.
"""

from . import _requires  # noqa: F401
from .environments import (
    EnvironmentTool,
    dense_reward,
    environment_dataset,
    environment_factory,
    outcome_reward,
)
from .grpo import FusedGRPOTrainer
from .rspo import RSPOGRPOTrainer

__all__ = [
    "EnvironmentTool",
    "FusedGRPOTrainer",
    "RSPOGRPOTrainer",
    "dense_reward",
    "environment_dataset",
    "environment_factory",
    "outcome_reward",
]

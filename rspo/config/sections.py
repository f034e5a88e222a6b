"""The sections of a configuration: dataclasses that check themselves when they are made. `rspo.config` joins them."""

from .checks import ConfigError
from .engine import SERVERS, EngineConfig
from .estimator import ESTIMATORS, GROUP_ESTIMATORS, METHODS, CriticConfig, EstimatorConfig
from .optimizer import OptimizerConfig
from .policy import ATTENTION, DTYPES, RESERVED_TEMPLATE_NAMES, AdapterConfig, PolicyConfig, WarmupConfig
from .rewards import RewardConfig, RewardModelConfig
from .rollout import EnvConfig, RolloutConfig
from .run import EvaluationConfig, ParallelConfig, RunConfig
from .swap import SwapConfig

__all__ = [
    "ATTENTION",
    "DTYPES",
    "ESTIMATORS",
    "GROUP_ESTIMATORS",
    "METHODS",
    "RESERVED_TEMPLATE_NAMES",
    "SERVERS",
    "AdapterConfig",
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
]

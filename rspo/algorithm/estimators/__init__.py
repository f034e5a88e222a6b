"""Advantage estimators, one file each, and the names they go by."""

from __future__ import annotations

from importlib import import_module

from ...config import ConfigError, EstimatorConfig
from .base import Estimator
from .gigpo import GiGPO
from .grpo import GRPO
from .ppo import PPO
from .reinforce_plus_plus import ReinforcePlusPlus
from .rloo import RLOO

__all__ = ["GRPO", "PPO", "RLOO", "Estimator", "GiGPO", "ReinforcePlusPlus", "make_estimator"]

_BY_NAME: dict[str, type[Estimator]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "gigpo": GiGPO,
    "ppo": PPO,
    "reinforce++": ReinforcePlusPlus,
}


def make_estimator(name: str, config: EstimatorConfig) -> Estimator:
    """The estimator of a name, or of a class path "package.module:Class". Raises ConfigError where there is none."""
    if name in _BY_NAME:
        return _BY_NAME[name](config)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"an estimator must be one of {', '.join(map(repr, _BY_NAME))}, or a class path; {name!r}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Estimator)):
        raise ConfigError(
            f"estimator {name!r} must be a subclass of rspo.algorithm.estimators.Estimator, got {found!r}"
        )
    return found(config)

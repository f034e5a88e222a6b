"""Advantage estimators, one file each."""

from __future__ import annotations

from ..config import ESTIMATORS, ConfigError, EstimatorConfig
from .base import Estimator
from .grpo import GRPO

__all__ = ["GRPO", "Estimator", "make_estimator"]

_BY_NAME = {"grpo": GRPO}


def make_estimator(config: EstimatorConfig) -> Estimator:
    """The configured estimator."""
    if config.name not in _BY_NAME:
        raise ConfigError(f"estimator.name must be one of {', '.join(map(repr, ESTIMATORS))}, got {config.name!r}")
    return _BY_NAME[config.name](config)

"""Where the records of a run go besides its `metrics.jsonl`, which stays the source of truth."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ...config import ConfigError
from .base import Record, Reporter, ScalarReporter
from .tensorboard_reporter import TensorBoardReporter
from .trackio_reporter import TrackioReporter
from .wandb_reporter import WandbReporter

_KINDS: tuple[type[ScalarReporter], ...] = (TensorBoardReporter, WandbReporter, TrackioReporter)
_BY_NAME: dict[str, type[Reporter]] = {kind.name: kind for kind in _KINDS}


def find_reporters(names: Sequence[str]) -> list[type[Reporter]]:
    """The reporters of names or class paths "package.module:Class". Raises ConfigError where one cannot be used."""
    found = []
    for name in names:
        kind: Any = _BY_NAME.get(name)
        if kind is None:
            module, _, attribute = name.partition(":")
            try:
                kind = getattr(import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"run.report_to: {name!r} cannot be imported: {error}") from error
            if not (isinstance(kind, type) and issubclass(kind, Reporter)):
                raise ConfigError(
                    f"run.report_to: {name!r} must be a subclass of rspo.runs.reporters.Reporter, got {kind!r}"
                )
        kind.check()
        found.append(kind)
    return found


__all__ = ["Record", "Reporter", "ScalarReporter", "find_reporters"]

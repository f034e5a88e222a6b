"""Where the records of a run go besides its `metrics.jsonl`, which stays the source of truth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .config import ConfigError

Record = dict[str, Any]


class Reporter(ABC):
    """Takes a run's records, each a plain dictionary as in `metrics.jsonl`: "kind", "step", and numbers or None.

    Args:
        folder: the run's folder.
        records: those of the run so far, where it is resumed. Whatever was reported after them is void.
    """

    @abstractmethod
    def __init__(self, folder: Path, records: Sequence[Record]) -> None: ...

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise ConfigError where a package that the reporter needs is missing; asked before anything else is done."""

    @abstractmethod
    def record(self, record: Record) -> None:
        """Report one record."""

    @abstractmethod
    def close(self) -> None:
        """Finish."""


class TensorBoardReporter(Reporter):
    """Event files in `folder/tensorboard`: scalars `<kind>/<name>` against A-updates, of agent B's updates ("dense")
    against B's.

    A resumed run's events are written anew from its records, so that no point stands there twice.
    """

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        logs = folder / "tensorboard"
        for old in logs.glob("events.out.tfevents.*"):
            old.unlink()
        # A TensorBoard that has read the old file is told to forget it.
        self.writer = SummaryWriter(str(logs), purge_step=0)
        self.counts: Counter[str] = Counter()
        for record in records:
            self.record(record)

    @classmethod
    def check(cls) -> None:
        try:
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ConfigError(
                f"run.report_to='tensorboard' needs a package: pip install 'rspo[tensorboard]' ({error})"
            ) from error

    def record(self, record: Record) -> None:
        kind = record["kind"]
        self.counts[kind] += 1
        step = self.counts[kind] if kind == "dense" else record["step"]
        for name, value in record.items():
            if name not in ("kind", "step") and value is not None:
                self.writer.add_scalar(f"{kind}/{name}", value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


_BY_NAME: dict[str, type[Reporter]] = {"tensorboard": TensorBoardReporter}


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
                    f"run.report_to: {name!r} must be a subclass of rspo.reporters.Reporter, got {kind!r}"
                )
        kind.check()
        found.append(kind)
    return found

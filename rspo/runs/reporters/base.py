"""What a reporter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ...config import ConfigError

Record = dict[str, Any]


class Reporter(ABC):
    """Takes a run's records, each a plain dictionary as in `metrics.jsonl`: "kind", "step", and numbers or None.

    Args:
        folder: the run's folder; its `config.yaml` is there already.
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


class ScalarReporter(Reporter):
    """A reporter that wants numbers called `<kind>/<name>` at a step: A-updates, of agent B's updates ("dense") B's.

    name: in `run.report_to`, also that of the extra with its package.  module: what must be there to be imported.
    """

    name: str
    module: str

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @classmethod
    def check(cls) -> None:
        try:
            import_module(cls.module)
        except ImportError as error:
            raise ConfigError(
                f"run.report_to={cls.name!r} needs a package: pip install 'rspo[{cls.name}]' ({error})"
            ) from error

    def record(self, record: Record) -> None:
        kind = record["kind"]
        self.counts[kind] += 1
        step = self.counts[kind] if kind == "dense" else record["step"]
        names = [name for name, value in record.items() if name not in ("kind", "step") and value is not None]
        self.add(kind, step, {f"{kind}/{name}": record[name] for name in names})

    @abstractmethod
    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Report the finite numbers of one record."""

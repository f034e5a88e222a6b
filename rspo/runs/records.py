"""Records of a run: metrics as JSON lines, passed on to reporters, and a progress bar."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from ..config.storage import writing
from .file_names import METRICS_FILE
from .reporters import Record, Reporter


class Tracker:
    """Writes `metrics.jsonl` and shows progress.

    Args:
        folder: the run's folder.
        steps: A-updates in all.
        start: A-updates already made.
        records: records that were written before the checkpoint that the run goes on from; those after them (of a run
            that went on past its checkpoint, and perhaps broke off inside a line) are dropped.
        progress: show a bar.
        reporters: kinds of reporters that take the records too.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        start: int = 0,
        records: int = 0,
        progress: bool = True,
        reporters: Sequence[type[Reporter]] = (),
    ) -> None:
        self.folder = folder
        self.path = folder / METRICS_FILE
        self.progress = progress
        self.reporters: list[Reporter] = []
        with writing(self.path):
            self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open for the length of the run
        with ExitStack() as on_failure:
            on_failure.callback(self._close_records)
            with writing(self.path):
                self.records = _cut(self.path, records)
            before = read_metrics(folder) if reporters else []
            for kind in reporters:
                self.reporters.append(kind(folder, before))
            on_failure.pop_all()
        self.listeners: list[Callable[[Record], None]] = [reporter.record for reporter in self.reporters]
        self.bar = tqdm(total=steps, initial=start, desc="training", unit="update", disable=not progress)

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append a record: kind is "update", "dense", "collect" or "evaluation"; step counts A-updates."""
        plain = _plain(kind, step, values)
        with writing(self.path):
            self.file.write(json.dumps(plain) + "\n")
            self.file.flush()
        self._tell(plain)

    def _tell(self, record: Record) -> None:
        self.records += 1
        for listen in self.listeners:
            listen(record)

    def sync(self) -> None:
        """Bring the records to the disk, so that a checkpoint never counts more of them than are there."""
        with writing(self.path):
            os.fsync(self.file.fileno())

    def show(self, phase: str, values: Mapping[str, float], advance: int = 0) -> None:
        """Update the bar."""
        clipped = values.get("clip_frac_low", 0.0) + values.get("clip_frac_high", 0.0)
        self.bar.set_description(phase)
        self.bar.set_postfix(
            success=f"{values['success']:.1%}",
            reward=f"{values['reward']:.2f}",
            clipped=f"{clipped:.1%}",
            kl=f"{values.get('approx_kl_k3', 0.0):.4f}",
            refresh=False,
        )
        self.bar.update(advance)

    def say(self, text: str) -> None:
        """A line above the bar, where there is one."""
        if not self.bar.disable:
            self.bar.write(text)

    def close(self) -> None:
        """Close file, reporters and bar."""
        self.bar.close()
        self._close_records()

    def _close_records(self) -> None:
        """Close reporters and file, each of them also where another one fails to."""
        with ExitStack() as opened:
            opened.callback(self._close_file)
            for reporter in self.reporters:
                opened.callback(reporter.close)

    def _close_file(self) -> None:
        with writing(self.path):
            self.file.close()


class Onlooker(Tracker):
    """The tracker of a process that leaves files, reporters and progress to the main one."""

    def __init__(self, folder: Path, records: int = 0) -> None:
        self.folder = folder
        self.listeners = []
        self.progress = False
        self.records = records

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Only pass it on to who listens in this process."""
        self._tell(_plain(kind, step, values))

    def sync(self) -> None:
        """Nothing."""

    def show(self, phase: str, values: Mapping[str, float], advance: int = 0) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _plain(kind: str, step: int, values: Mapping[str, float]) -> Record:
    plain: Record = {"kind": kind, "step": step}
    for name, value in values.items():
        if isinstance(value, int):
            plain[name] = value
        else:
            plain[name] = float(f"{value:.8g}") if math.isfinite(value) else None
    return plain


def _cut(path: Path, records: int) -> int:
    """Cut a file of records in place to the first `records`, which needs no room on the disk; how many there are."""
    kept = end = 0
    with open(path, "rb") as file:
        for line in file:
            if kept == records or not line.endswith(b"\n"):
                break
            kept, end = kept + 1, end + len(line)
    os.truncate(path, end)
    return kept


def without_timings(records: Sequence[Record]) -> list[Record]:
    """Records without what depends on the machine's speed. All else is the same, bit for bit on one CPU thread, in a
    run that was interrupted and resumed and in one that was not."""
    return [{name: value for name, value in record.items() if not _is_timing(name)} for record in records]


def _is_timing(name: str) -> bool:
    return name == "seconds" or name.startswith("seconds/")


def _record(line: str) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict) or not {"kind", "step"} <= set(record):
        raise ValueError(f"expected an object with kind and step, got {line.strip()[:80]!r}")
    return record


def read_metrics(folder: Path, kind: str | None = None) -> list[Record]:
    """Records of a run, of one kind or all; a last line that was never finished is left out.

    Raises FileNotFoundError that names the missing file, ValueError that names a line that is no record.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} is not the folder of a run")
    records: list[Record] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                try:
                    records.append(_record(line))
                except ValueError as error:
                    raise ValueError(f"line {number} of {path} is not a record: {error}") from error
    return [record for record in records if kind is None or record["kind"] == kind]

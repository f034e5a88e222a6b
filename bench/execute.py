"""Runs a plan of training runs over several processes; what is finished is kept, what broke off goes on from its
checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from rspo.config import Config

COLUMNS = ("step", "success", "dense_return", "turns", "identical_states_per_turn", "trajectories", "tokens")
"""What is kept of each evaluation of any run."""
ROW_FILE = "row.json"
"""In a run's folder once it has finished."""

Row = dict[str, Any]


class Planned(Protocol):
    """One run of a plan. It is sent to other processes, so that it must be picklable."""

    @property
    def key(self) -> str:
        """A name for files and records; the same settings have the same."""
        ...

    @property
    def start_name(self) -> str:
        """A name for its start policy; runs from the same start share it."""
        ...

    @property
    def start_config(self) -> Config:
        """What its start policy is warmed up with."""
        ...

    def config(self, start: Path) -> Config:
        """What it is run with, from the start policy at a path."""
        ...

    def head(self) -> Row:
        """What tells it apart in its row."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """What is kept of each evaluation besides COLUMNS, null where a record lacks it."""
        ...


def execute(
    specs: Sequence[Planned], done: Sequence[Row], folder: Path, jobs: int, save: Callable[[list[Row]], None]
) -> list[Row]:
    """The rows of all runs, in the plan's order.

    Args:
        done: rows of an earlier execution; runs among them are not run again.
        folder: run folders, and start policies in `starts`.
        jobs: processes at once, one thread each.
        save: called with all rows so far whenever a run has finished.

    After an error or Ctrl-C the runs that wait are given up, but for one or two that a process has taken already.

    Raises FolderInUseError where another process makes runs in the folder.
    """
    from rspo.config.lock import FolderLock

    with FolderLock(folder):
        return _execute(specs, done, folder, jobs, save)


def _execute(
    specs: Sequence[Planned], done: Sequence[Row], folder: Path, jobs: int, save: Callable[[list[Row]], None]
) -> list[Row]:
    rows = {row["key"]: row for row in done}
    open_specs = [spec for spec in specs if spec.key not in rows]
    starts = {spec.start_name: spec for spec in open_specs}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        try:
            warmups = [pool.submit(make_start, spec, folder) for spec in starts.values()]
            for warmup in tqdm(as_completed(warmups), total=len(warmups), desc="start policies"):
                warmup.result()
            running: dict[Future[Row], Planned] = {pool.submit(run, spec, folder): spec for spec in open_specs}
            for future in tqdm(as_completed(running), total=len(running), desc="runs"):
                rows[running[future].key] = future.result()
                save([rows[spec.key] for spec in specs if spec.key in rows])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[spec.key] for spec in specs]


def _quiet() -> None:
    """Workers draw no progress bars of their own."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def start_folder(spec: Planned, folder: Path) -> Path:
    """Where the start policy of a run is."""
    return folder / "starts" / spec.start_name


def make_start(spec: Planned, folder: Path) -> None:
    """Warm a start policy up, unless it is there already."""
    from rspo.runs.setting import build_env, set_threads
    from rspo.start import start_policy

    config = spec.start_config
    set_threads(config)
    start_policy(config, build_env(config), start_folder(spec, folder), progress=False)


def run(spec: Planned, folder: Path) -> Row:
    """Make one run, or go on with it, and say what came of it. Its checkpoints are deleted at the end."""
    from rspo.config.storage import write_text
    from rspo.start import CONFIG_FILE, open_run

    out = folder / spec.key
    if (out / ROW_FILE).is_file():  # finished when the suite was being stopped
        return dict(json.loads((out / ROW_FILE).read_text(encoding="utf-8")))
    config = spec.config(start_folder(spec, folder) / "start")
    trainer = open_run(config, out, resume=(out / CONFIG_FILE).is_file(), progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    row = summary(spec, out)
    write_text(out / ROW_FILE, json.dumps(row))
    shutil.rmtree(out / "checkpoints")
    return row


def summary(spec: Planned, out: Path) -> Row:
    """A finished run as a row: its evaluations, and means over its updates of A."""
    from rspo.runs.records import read_metrics

    evaluations, updates = read_metrics(out, "evaluation"), read_metrics(out, "update")
    replay = [record["replay/zero_advantages"] for record in updates if "replay/zero_advantages" in record]
    return {
        "key": spec.key,
        **spec.head(),
        "seconds": round(updates[-1]["seconds"], 1),
        "replay_zero_advantages": round(sum(replay) / len(replay), 4) if replay else None,
        **{column: [record[column] for record in evaluations] for column in COLUMNS},
        **{column: [record.get(column) for record in evaluations] for column in spec.columns},
    }

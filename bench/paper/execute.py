"""Runs a plan over several processes; what is finished is kept, what broke off goes on from its checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .plan import STARTS, Spec

COLUMNS = ("step", "success", "dense_return", "turns", "identical_states_per_turn", "trajectories", "tokens")
"""What is kept of each evaluation."""
ROW_FILE = "row.json"
"""In a run's folder once it has finished."""

Row = dict[str, Any]


def execute(
    specs: Sequence[Spec], done: Sequence[Row], folder: Path, jobs: int, save: Callable[[list[Row]], None]
) -> list[Row]:
    """The rows of all runs, in the plan's order.

    Args:
        done: rows of an earlier execution; runs among them are not run again.
        folder: run folders, and start policies in `starts`.
        jobs: processes at once, one thread each.
        save: called with all rows so far whenever a run has finished.

    After an error or Ctrl-C the runs that wait are given up, but for one or two that a process has taken already.
    """
    rows = {row["key"]: row for row in done}
    open_specs = [spec for spec in specs if spec.key not in rows]
    starts = dict.fromkeys((spec.start, spec.seed) for spec in open_specs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        try:
            warmups = [pool.submit(make_start, start, seed, folder) for start, seed in starts]
            for warmup in tqdm(as_completed(warmups), total=len(warmups), desc="start policies"):
                warmup.result()
            running: dict[Future[Row], Spec] = {pool.submit(run, spec, folder): spec for spec in open_specs}
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


def start_folder(start: str, seed: int, folder: Path) -> Path:
    """Where the start policy of a seed is."""
    return folder / "starts" / f"{start[:3]}-{seed}"


def make_start(start: str, seed: int, folder: Path) -> None:
    """Warm a start policy up, unless it is there already."""
    from rspo.config import default_config
    from rspo.config_io import apply_flags
    from rspo.runs import build_env, set_threads, start_policy

    config = apply_flags(default_config(), [f"run.seed={seed}", *STARTS[start]])
    set_threads(config)
    start_policy(config, build_env(config), start_folder(start, seed, folder), progress=False)


def run(spec: Spec, folder: Path) -> Row:
    """Make one run, or go on with it, and say what came of it. Its checkpoints are deleted at the end."""
    from rspo.config import default_config
    from rspo.config_io import apply_flags
    from rspo.runs import CONFIG_FILE, open_run
    from rspo.storage import write_text

    out = folder / spec.key
    if (out / ROW_FILE).is_file():  # finished when the suite was being stopped
        return dict(json.loads((out / ROW_FILE).read_text(encoding="utf-8")))
    path = start_folder(spec.start, spec.seed, folder) / "start"
    config = apply_flags(default_config(spec.method, spec.base), [*spec.settings, f"policy.path={path}"])
    trainer = open_run(config, out, resume=(out / CONFIG_FILE).is_file(), progress=False)
    try:
        trainer.train()
    finally:
        trainer.close()
    row = summary(spec, out)
    write_text(out / ROW_FILE, json.dumps(row))
    shutil.rmtree(out / "checkpoints")
    return row


def summary(spec: Spec, out: Path) -> Row:
    """A finished run as a row: its evaluations, and means over its updates of A."""
    from rspo.tracking import read_metrics

    evaluations, updates = read_metrics(out, "evaluation"), read_metrics(out, "update")
    replay = [record["replay/zero_advantages"] for record in updates if "replay/zero_advantages" in record]
    return {
        "key": spec.key,
        "method": spec.method,
        "base": spec.base,
        "start": spec.start,
        "seed": spec.seed,
        "steps": spec.steps,
        "flags": list(spec.flags),
        "seconds": round(updates[-1]["seconds"], 1),
        "replay_zero_advantages": round(sum(replay) / len(replay), 4) if replay else None,
        **{column: [record[column] for record in evaluations] for column in COLUMNS},
    }

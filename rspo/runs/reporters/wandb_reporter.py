"""Weights & Biases."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast
from uuid import uuid4

from ...config import ConfigError
from ...config.files import CONFIG_FILE, flat_settings, load_config
from ...config.storage import write_text
from .base import Record, ScalarReporter

ID_FILE = "wandb.id"
"""Under which a run's folder keeps the id of its run in Weights & Biases."""
MODE = "WANDB_MODE"
MODES = ("online", "offline", "disabled")
KINDS = ("update", "dense", "collect", "evaluation")


class WandbReporter(ScalarReporter):
    """A run of Weights & Biases: without `run.report_online` an offline one in `folder/wandb`, which `wandb sync`
    sends; `WANDB_MODE`, `WANDB_PROJECT` and `WANDB_NAME` decide where they are set. The project is `rspo`, the name the
    folder's.

    Its own step is the number of the record, and `<kind>/step` the x axis of a kind's numbers. A resumed run keeps its
    id. Offline its file is written anew from the records. What was sent cannot be taken back, so that online the
    records that are there already are not sent a second time: they are the same ones, unless a setting has changed.
    """

    name = "wandb"
    module = "wandb"

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        super().__init__()
        config = load_config(folder / CONFIG_FILE)
        mode = os.environ.get(MODE) or ("online" if config.run.report_online else "offline")
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of wandb's own faults, to its makers
        import wandb

        for old in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(old)
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rspo"),
                name=os.environ.get("WANDB_NAME", folder.resolve().name),
                id=_run_id(folder),
                resume="allow" if mode == "online" else None,
                mode=cast(Literal["online", "offline", "disabled"], mode),
                dir=str(folder),
                config=flat_settings(config),
                reinit="create_new",
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(f"run.report_to='wandb': {error}") from error
        for kind in KINDS:
            self.run.define_metric(f"{kind}/step")
            self.run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        self.sent = self.run.step
        self.number = 0
        for record in records:
            self.record(record)

    @classmethod
    def check(cls) -> None:
        super().check()
        mode = os.environ.get(MODE)
        if mode and mode not in MODES:
            raise ConfigError(f"{MODE} must be one of {', '.join(map(repr, MODES))}, got {mode!r}")

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if self.number >= self.sent:
            self.run.log({**values, f"{kind}/step": step}, step=self.number)
        self.number += 1

    def close(self) -> None:
        self.run.finish()


def _run_id(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.is_file():
        write_text(path, uuid4().hex[:8])
    return path.read_text(encoding="utf-8")

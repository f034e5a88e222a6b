"""Trackio, which keeps its runs on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ...config.files import CONFIG_FILE, flat_settings, load_config
from ...config.storage import write_text
from .base import Record, ScalarReporter

ID_FILE = "trackio.id"
"""Under which a run's folder keeps the id of its run in Trackio."""
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Environment variables that have Trackio send its runs somewhere."""


class TrackioReporter(ScalarReporter):
    """A run of Trackio in the project `rspo` (or `TRACKIO_PROJECT`), under the folder's name; `trackio show` draws it.

    Trackio keeps it in `TRACKIO_DIR`, and sends it elsewhere only where its environment variables say so. A resumed
    run is written anew from its records, and its former self deleted there; one that was sent elsewhere stays beside.
    """

    name = "trackio"
    module = "trackio"

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        super().__init__()
        import trackio

        config = load_config(folder / CONFIG_FILE)
        online = config.run.report_online or any(os.environ.get(name) for name in REMOTE)
        project = os.environ.get("TRACKIO_PROJECT", "rspo")
        _delete(project, folder / ID_FILE)
        with nullcontext() if online else _hub_out_of_reach():
            self.run = trackio.init(
                project=project, name=folder.resolve().name, config=flat_settings(config), embed=False
            )
        write_text(folder / ID_FILE, self.run.id)
        for record in records:
            self.record(record)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def _delete(project: str, id_file: Path) -> None:
    """Delete the run whose id a file holds from this machine, where both are there."""
    if not id_file.is_file():
        return
    import trackio

    mine = id_file.read_text(encoding="utf-8")
    try:
        runs = trackio.Api().runs(project)
    except ValueError:  # no such project
        return
    for run in runs:
        if run.id == mine:
            run.delete()


@contextmanager
def _hub_out_of_reach() -> Iterator[None]:
    """Where a token of the Hugging Face Hub is stored, Trackio would ask the hub for its owner's name."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before

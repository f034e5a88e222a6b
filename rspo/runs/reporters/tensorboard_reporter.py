"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .base import Record, ScalarReporter


class TensorBoardReporter(ScalarReporter):
    """Event files in `folder/tensorboard`.

    A resumed run's events are written anew from its records, so that no point stands there twice.
    """

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        super().__init__()
        from torch.utils.tensorboard import SummaryWriter

        logs = folder / "tensorboard"
        for old in logs.glob("events.out.tfevents.*"):
            old.unlink()
        # A TensorBoard that has read the old file is told to forget it.
        self.writer = SummaryWriter(str(logs), purge_step=0)
        for record in records:
            self.record(record)

    def add(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()

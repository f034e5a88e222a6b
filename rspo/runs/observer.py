"""Who watches a run from inside its process, and may ask it for something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .reporters import Record


class Observer:
    """Is told what a run does, and asked at three places what it should do. This one listens and wants nothing."""

    def on_step_begin(self) -> None:
        """An update of agent A begins."""

    def on_record(self, record: Record) -> None:
        """A record has been written: of an update of A or B, a collection or an evaluation."""

    def on_save(self, path: Path) -> None:
        """A checkpoint stands at `path`."""

    def wants_evaluation(self) -> bool:
        """Asked after each update of A: whether to evaluate now, though it is not due."""
        return False

    def wants_checkpoint(self) -> bool:
        """Asked after each loop: whether to save a checkpoint, though it is not due."""
        return False

    def wants_stop(self) -> bool:
        """Asked before each loop: whether training ends here."""
        return False

    def checkpoint_state(self) -> dict[str, Any]:
        """What a resumed run's observer has to know, as plain values; a checkpoint keeps it."""
        return {}

    def load_checkpoint_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `checkpoint_state`."""

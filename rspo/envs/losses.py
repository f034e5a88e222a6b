"""What is said of lost episodes: the traceback once for each kind of failure, then a line with a count."""

from __future__ import annotations

import logging
import traceback
from collections import Counter


def place_of(error: BaseException) -> str:
    """Where an exception was raised; exceptions of one class from one place are of one kind."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


class LossLog:
    """Counts the failures of each kind, and warns of them."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.counts: Counter[tuple[str, str]] = Counter()

    def warn(self, kind: tuple[str, str], text: str, trace: str) -> None:
        """Say what failed and why.

        kind: the name of the exception's class, and where it was raised.
        trace: its traceback.
        """
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self.logger.warning("%s\n%s", text, trace.rstrip())
        else:
            self.logger.warning("%s; number %d of this kind, see the first one's traceback", text, self.counts[kind])

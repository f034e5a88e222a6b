"""Where a training step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class PhaseTimer:
    """Seconds of wall clock by phase. The time of a phase inside another belongs to the inner one alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._phases: list[str] = []
        self._since = 0.0

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Add the time of a block to a phase."""
        return self._running(phase)

    @contextmanager
    def _running(self, phase: str) -> Iterator[None]:
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: str) -> None:
        """A phase begins inside the one that is running."""
        self._credit()
        self._phases.append(phase)

    def end(self) -> None:
        """The innermost phase ends."""
        self._credit()
        self._phases.pop()

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as `seconds/<phase>`."""
        self._credit()
        taken = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken

    def _credit(self) -> None:
        """Give the time since the last call to the innermost phase."""
        now = time.perf_counter()
        if self._phases:
            self.seconds[self._phases[-1]] += now - self._since
        self._since = now

"""Where a training step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Seconds of wall clock by phase. Phases do not nest."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds since the last call, as `seconds/<phase>`."""
        taken = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds.clear()
        return taken

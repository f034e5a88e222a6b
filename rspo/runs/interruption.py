"""Ctrl-C and SIGTERM: a run stops where it stands, closes its files and processes, and can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has come.

    Args:
        signal_number: which.
        advice: how to go on.
    """

    def __init__(self, signal_number: int, advice: str = "") -> None:
        super().__init__(signal_number, advice)
        self.signal_number = signal_number
        self.advice = advice

    def __str__(self) -> str:
        name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(signal.Signals(self.signal_number), "a signal")
        return f"stopped by {name}" + (f"; {self.advice}" if self.advice else "")

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that a signal has ended: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the block at the first SIGINT or SIGTERM; a second one ends the process on the spot.

    A signal that the process was started to ignore stays ignored, and outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.getsignal(s) for s in signals}

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for s in signals:
            signal.signal(s, signal.SIG_DFL)
        raise Interrupted(number)

    for s in signals:
        signal.signal(s, stop)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)

"""The inside of an environment's worker process, and the channel to it.

Messages are pickled. They pass between processes that this program has started itself, over a socket pair that nothing
else can reach; nothing from outside is ever unpickled.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rspo.envs.base import BatchedEnv
from rspo.envs.losses import place_of

_HEADER = struct.Struct(">Q")
GRACE = 1.0
"""Seconds that reading a message may take even after its deadline: it may have come in time and only been waiting."""


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as text: the exception itself may not be picklable. place: where it was raised."""

    kind: str
    message: str
    trace: str
    place: str


class Channel:
    """One end of a socket pair, for whole messages within a time limit.

    Raises TimeoutError, or another OSError or EOFError where the other end is gone.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, message: bytes, deadline: float | None = None) -> None:
        """Send a pickled message before `time.monotonic()` is at `deadline`."""
        self._limit(deadline)
        self.end.sendall(_HEADER.pack(len(message)) + message)

    def receive(self, deadline: float | None = None) -> Any:
        """The next message."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
        return pickle.loads(self._read(size, deadline))

    def close(self) -> None:
        """Close this end, which ends a worker at the other."""
        self.end.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._limit(deadline)
            part = self.end.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the other end is closed")
            data += part
        return data

    def _limit(self, deadline: float | None) -> None:
        self.end.settimeout(None if deadline is None else max(deadline - time.monotonic(), GRACE))


def serve(end: socket.socket, factory: Any, options: Mapping[str, Any]) -> None:
    """Build an environment and do what is asked of it until the other end closes.

    Says first whether it could be built (None, or a Failure). Then each request (method, arguments) is answered by
    what the method returns, or by a Failure.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the trainer decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    channel = Channel(end)
    env: BatchedEnv | None = None
    try:
        env = factory(**options)
        channel.send(pickle.dumps(None))
    except Exception as error:
        channel.send(pickle.dumps(_failure(error)))
        return
    while True:
        try:
            method, arguments = channel.receive()
            channel.send(_answer(env, method, arguments))
        except (EOFError, OSError):
            break
    env.close()


def _answer(env: BatchedEnv, method: str, arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(getattr(env, method)(*arguments), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps(_failure(error))


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)), place_of(error))


def _end_with_parent() -> None:
    """A worker in the middle of a step does not see its channel close, and must not outlive the trainer either."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""A worker process as its owner holds it: the process, the channel to it, and why it was lost."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rspo.envs import EnvFactory
from rspo.envs.base import BatchedEnv, WorkerError
from rspo.envs.worker_process import Channel, Failure, serve

CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Lost:
    """Why a worker was lost."""

    reason: str


class Worker:
    """One process and the channel to it.

    Args:
        index: its number.
        factory: makes its environment of `options`.
    """

    def __init__(self, index: int, factory: EnvFactory, options: Mapping[str, Any]) -> None:
        self.index = index
        self.factory = factory
        self.options = options
        self.losses_in_a_row = 0
        self._process: Any = None
        self._channel: Channel | None = None
        self._is_built = False

    @property
    def process(self) -> Any:
        """The running process; None where there is none."""
        return self._process

    def start(self) -> None:
        """Start the process unless it runs; it builds its environment meanwhile."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with _main_module_hidden(self.factory):
            self._process = multiprocessing.get_context("spawn").Process(
                target=serve, args=(theirs, self.factory, self.options), name=f"rspo-env-{self.index}", daemon=True
            )
            self._process.start()
        theirs.close()
        self._channel, self._is_built = Channel(ours), False

    def send(self, request: bytes, deadline: float) -> Lost | None:
        """Send a request."""
        assert self._channel is not None
        try:
            self._channel.send(request, deadline)
        except OSError as error:
            return self._diagnose(error)
        return None

    def receive(self, deadline: float, timeout: float) -> Any:
        """The answer, a Failure, or Lost. Raises WorkerError where the environment could not be built."""
        assert self._channel is not None
        try:
            if not self._is_built:
                failure = self._channel.receive(deadline)
                if isinstance(failure, Failure):
                    raise WorkerError(f"environment worker {self.index} could not start:\n{failure.trace}")
                self._is_built = True
            return self._channel.receive(deadline)
        except TimeoutError:
            return Lost(f"has not answered for {timeout:g} s (env.worker_timeout)")
        except (OSError, EOFError) as error:
            return self._diagnose(error)

    def _diagnose(self, error: Exception) -> Lost:
        self._process.join(CLOSING_SECONDS)
        code = self._process.exitcode
        return Lost(f"is gone (exit code {code})" if code is not None else f"does not listen any more ({error})")

    def hang_up(self) -> None:
        """Close the channel, which tells the process to end."""
        if self._channel is not None:
            self._channel.close()

    def stop(self, seconds: float = 0.0) -> None:
        """End the process; it has some seconds to end by itself."""
        self.hang_up()
        if self._process is not None:
            if seconds > 0:
                self._process.join(seconds)
            self._process.kill()
            self._process.join()
            self._process.close()
        self._channel = self._process = None


@contextmanager
def _main_module_hidden(factory: Callable[..., BatchedEnv]) -> Iterator[None]:
    """A spawned process imports the main script again, and with `rspo` all of torch and transformers, which takes
    seconds and hundreds of megabytes that an environment seldom needs. One defined in the script itself does."""
    if getattr(factory, "__module__", None) == "__main__":
        yield
        return
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

"""Peak memory of one call on the CPU, each in a fresh process.

Linux keeps a process's largest resident size (VmHWM) and forgets it on request (5 into /proc/self/clear_refs). A
process that has run other providers holds memory of theirs that the next one would use for free, so each provider gets
its own, forked from a small server that has only imported modules.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from .providers import providers
from .timing import measured
from .workloads import Workload, make

SECONDS = 180.0
"""A process that takes longer is stopped."""


def peak_bytes(workload: Workload, provider: str, direction: str, old_logp: Tensor | None, threads: int) -> int | str:
    """Most bytes resident during a call beyond those before it; or, in words, why that is not known."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    old = None if old_logp is None else old_logp.tolist()
    process = context.Process(target=_child, args=(sender, workload, provider, direction, old, threads))
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(SECONDS) else f"peak: no answer within {SECONDS:g} s"
    except EOFError:
        answer = "peak: the process ended early"
    if process.is_alive() and isinstance(answer, str):
        process.terminate()
    process.join()
    return answer


def _child(
    sender: Connection, workload: Workload, name: str, direction: str, old: list[float] | None, threads: int
) -> None:
    try:
        torch.set_num_threads(threads)
        inputs = make(workload, torch.device("cpu"), None if old is None else torch.tensor(old))
        provider = next(p for p in providers(workload.op) if p.name == name)
        function = provider.load()
        if provider.prepare is not None:
            inputs = provider.prepare(inputs)
        if provider.compiled:
            measured(function, inputs, direction)
        sender.send(resident_peak(lambda: measured(function, inputs, direction)))
    except Exception as error:
        sender.send(f"peak: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def resident_peak(call: Callable[[], object]) -> int | str:
    """Bytes that a call adds to the resident size of this process at its highest."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory already freed must not count as there before
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        peak = _status("VmHWM") - before
    except OSError as error:
        return f"peak: /proc does not tell ({error.strerror})"
    del result
    return peak


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(0, f"no {name}")
    return 1024 * int(found[1])

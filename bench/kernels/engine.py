"""One workload: check every provider against the reference, time those that are right, measure their memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .floor import Rates
from .memory import peak_bytes
from .providers import OURS, Function, Provider, providers
from .reference import TOLERANCE, Expected, expect, relative_error
from .timing import Clock, first_line, gradients, interleave, measured
from .workloads import Inputs, Workload, make


@dataclass(frozen=True)
class Settings:
    """How a run measures. share: seconds that one provider may use in one direction of a workload.

    compilers: False leaves out providers that compile, unless `peers` names them.
    """

    device: torch.device
    threads: int
    share: float
    least: int = 3
    most: int = 100
    peers: Sequence[str] | None = None
    memory: bool = True
    compilers: bool = True


@dataclass
class Entry:
    """A provider and what became of it. status: "right", "wrong", "absent" or "failed"."""

    provider: Provider
    status: str = "absent"
    note: str = ""
    error: float | None = None
    seconds: float = 0.0
    peak: int | None = None
    function: Function | None = None
    inputs: Inputs | None = None


def run_workload(workload: Workload, settings: Settings, rates: Rates) -> list[dict[str, Any]]:
    """The rows of a workload, a direction and a provider each."""
    reason = _does_not_fit(workload, settings.device)
    if reason:
        return not_run(workload, settings, reason)
    torch._dynamo.reset()
    # The reference is not measured and may use the whole machine.
    torch.set_num_threads(max(settings.threads, len(os.sched_getaffinity(0))))
    inputs = make(workload, settings.device)
    expected = expect(inputs)
    torch.set_num_threads(settings.threads)
    entries = [_checked(p, inputs, expected, settings) for p in providers(workload.op, settings.peers)]
    del expected
    if workload.memory and settings.memory and settings.device.type == "cpu":
        for entry in entries:
            if entry.status == "right":
                _cpu_peak(entry, inputs, settings)
    rows = []
    for direction in workload.directions:
        rows += _timed(entries, inputs, direction, settings, rates)
    del entries, inputs
    _collect(settings.device)
    return rows


def not_run(workload: Workload, settings: Settings, reason: str) -> list[dict[str, Any]]:
    """Rows of a workload that was left out, a direction each."""
    return [
        _row(workload, direction, "all", "", settings) | {"status": "not run", "note": f"not run: {reason}"}
        for direction in workload.directions
    ]


def _checked(provider: Provider, inputs: Inputs, expected: Expected, settings: Settings) -> Entry:
    """Load a provider and hold its outputs and gradients against the reference's; never raises."""
    entry = Entry(provider, note=provider.note)
    try:
        function = provider.load()
    except ImportError as error:
        entry.note = f"not installed ({error})" if error.name else f"cannot be imported: {first_line(error)}"
        return entry
    except Exception as error:
        entry.status, entry.note = "failed", first_line(error)
        return entry
    if settings.device.type not in provider.devices:
        entry.note = f"does not run on {settings.device.type}"
        return entry
    if provider.compiled and not settings.compilers and provider.library not in (settings.peers or ()):
        entry.note = "not run: it compiles first; name it with --peers, or leave out --quick"
        return entry
    try:
        entry.inputs = inputs if provider.prepare is None else provider.prepare(inputs)
        entry.error = _error(function, entry.inputs, expected)
        direction = inputs.workload.directions[0]
        if settings.device.type == "cuda":
            entry.peak = _cuda_peak(function, entry.inputs, direction, settings.device)
        entry.seconds = _duration(function, entry.inputs, direction, settings.device)
    except Exception as error:
        entry.status, entry.note = "failed", first_line(error)
    if entry.status == "failed":
        entry.inputs = None
        _collect(settings.device)  # now that the exception is gone, whose frames held what the call had allocated
        return entry
    limit = TOLERANCE[inputs.workload.dtype]
    assert entry.error is not None
    if not entry.error <= limit:
        entry.status, entry.note = "wrong", f"wrong: error {entry.error:.1g} (at most {limit:g}); not timed"
        return entry
    entry.status, entry.function = "right", function
    return entry


def _error(function: Function, inputs: Inputs, expected: Expected) -> float:
    """Largest relative error of outputs and gradients."""
    outputs = function(inputs)
    errors = [
        relative_error(outputs[name], value, expected.scales.get(name), expected.where)
        for name, value in expected.outputs.items()
    ]
    if expected.gradients:
        found = gradients(outputs, inputs)
        errors += [relative_error(_unpadded(found[name], inputs), g) for name, g in expected.gradients.items()]
    return max(errors)


def _unpadded(gradient: Tensor, inputs: Inputs) -> Tensor:
    """Without the last column of logits [B, L + 1, V]."""
    length = inputs.workload.length
    return gradient[:, :length] if gradient.dim() == 3 and gradient.shape[1] == length + 1 else gradient


def _duration(function: Function, inputs: Inputs, direction: str, device: torch.device) -> float:
    """Seconds of a call after the first, to choose repetitions."""
    start = time.perf_counter()
    measured(function, inputs, direction, function(inputs) if direction == "backward" else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _cuda_peak(function: Function, inputs: Inputs, direction: str, device: torch.device) -> int:
    """Bytes that the allocator held at most during a call beyond those before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    measured(function, inputs, "both" if direction == "backward" else direction)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_peak(entry: Entry, inputs: Inputs, settings: Settings) -> None:
    direction = inputs.workload.directions[0]
    answer = peak_bytes(inputs.workload, entry.provider.name, direction, inputs.state(), settings.threads)
    if isinstance(answer, int):
        entry.peak = answer
    else:
        entry.note = "; ".join(x for x in (entry.note, answer) if x)


def _timed(
    entries: list[Entry], inputs: Inputs, direction: str, settings: Settings, rates: Rates
) -> list[dict[str, Any]]:
    """Rows of one direction: the right providers in turn, the others as they are."""
    workload, clock = inputs.workload, Clock(settings.device)
    calls: dict[str, Callable[[], tuple[float, float]]] = {}
    failures: dict[str, str] = {}
    for entry in entries:
        if entry.status != "right":
            continue
        assert entry.function is not None
        assert entry.inputs is not None
        try:
            # Once more in this direction: it may compile something of its own.
            seconds = entry.seconds
            if direction != workload.directions[0]:
                seconds = _duration(entry.function, entry.inputs, direction, settings.device)
            calls[entry.provider.name] = clock.sampler(entry.function, entry.inputs, direction, seconds)
        except Exception as error:
            failures[entry.provider.name] = first_line(error)
    gc.collect()
    samples = interleave(calls, settings.share, settings.least, settings.most)
    failures |= {name: found.failure for name, found in samples.items() if found.failure}
    floor = rates.seconds(inputs, direction)
    rows = []
    for entry in entries:
        name = entry.provider.name
        row = _row(workload, direction, name, entry.provider.library, settings)
        row |= {"status": entry.status, "error": entry.error, "floor_ms": 1e3 * floor, "note": entry.note}
        if direction == workload.directions[0]:
            row["peak_bytes"] = entry.peak
        if name in failures:
            row |= {"status": "failed", "note": failures[name]}
        elif name in samples:
            middle, low, high = samples[name].quantiles()
            row |= {
                "median_ms": 1e3 * middle,
                "q20_ms": 1e3 * low,
                "q80_ms": 1e3 * high,
                "cpu_ms": 1e3 * sorted(samples[name].cpu)[len(samples[name].cpu) // 2] or None,
                "rounds": len(samples[name].wall),
                "vs_floor": middle / floor,
            }
        if entry.provider.library == OURS and row["status"] != "right":
            row["fault"] = True
        rows.append(row)
    compare_with_best(rows)
    return rows


def compare_with_best(rows: list[dict[str, Any]]) -> None:
    """Fill in `vs_best`. Ours: the fastest peer's median over ours (> 1: ours is faster). A peer: its median over the
    fastest of all, ours included (1: it is the fastest)."""
    timed = [row for row in rows if row["median_ms"] is not None]
    peers = [row["median_ms"] for row in timed if row["library"] != OURS]
    for row in timed:
        if row["library"] != OURS:
            row["vs_best"] = row["median_ms"] / min(x["median_ms"] for x in timed)
        elif peers:
            row["vs_best"] = min(peers) / row["median_ms"]


def _row(workload: Workload, direction: str, name: str, library: str, settings: Settings) -> dict[str, Any]:
    """A row with nothing measured."""
    return {
        "op": workload.op,
        "model": workload.model,
        "n": workload.rows,
        "vocab": workload.vocab or None,
        "hidden": workload.hidden_size or None,
        "active": workload.active,
        "natural": workload.natural,
        "shape": workload.shape,
        "rows": workload.kind,
        "dtype": workload.dtype,
        "device": settings.device.type,
        "direction": direction,
        "provider": name,
        "library": library,
        "status": "",
        "median_ms": None,
        "q20_ms": None,
        "q80_ms": None,
        "cpu_ms": None,
        "rounds": 0,
        "error": None,
        "peak_bytes": None,
        "floor_ms": None,
        "vs_best": None,
        "vs_floor": None,
        "note": "",
        "fault": False,
    }


def _does_not_fit(workload: Workload, device: torch.device) -> str:
    """Why a workload has no room here, or nothing.

    A GPU's provider that runs out of memory is a row of its own; on the CPU it would take the whole process down.
    """
    need = workload.bytes_needed(hungriest=device.type == "cpu")
    if device.type == "cuda":
        free = float(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    else:
        free = _available()
    return "" if need <= 0.9 * free else f"needs about {need / 2**30:.0f} GiB, {free / 2**30:.0f} are free"


def _available() -> float:
    """Bytes that new allocations can have on this machine."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    return float("inf")


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # a kernel that broke the device: what was measured before is still good
            torch.cuda.empty_cache()

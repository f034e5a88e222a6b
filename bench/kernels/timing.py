"""Clocks: what one call takes, many providers in turn.

Interleaved: one call of each provider a round, the order rotated from round to round, so that a slow minute of the
machine falls on all of them. A provider takes part until its share of time is used up, but in no fewer than `least`
rounds. Medians with the 20 % and 80 % quantiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .workloads import Inputs

SHORTEST = 1e-3
"""Seconds: a sample on the CPU repeats shorter calls until it lasts that long."""


@dataclass
class Samples:
    """Seconds of single calls. cpu: process time, over all threads (0 on accelerators). failure: why they ended."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    failure: str = ""

    def quantiles(self) -> tuple[float, float, float]:
        """Median, 20 % and 80 % quantile, in seconds."""
        return quantile(self.wall, 0.5), quantile(self.wall, 0.2), quantile(self.wall, 0.8)


def first_line(error: BaseException) -> str:
    """An exception in at most 160 characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the sorted values, as numpy.quantile."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(
    calls: Mapping[str, Callable[[], tuple[float, float]]],
    share: float,
    least: int,
    most: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Samples]:
    """Run each call, which returns its wall and CPU seconds, in rotated rounds until its share of seconds is used up.

    The share counts everything a call does, also what it leaves out of its own measure. A call that raises (a GPU's
    memory may run out late) takes no further part.
    """
    samples = {name: Samples() for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    names = list(calls)
    for turn in range(most):
        running = [n for n in names if not samples[n].failure and (len(samples[n].wall) < least or spent[n] < share)]
        if not running:
            break
        at = turn % len(running)
        for name in running[at:] + running[:at]:
            start = clock()
            try:
                wall, cpu = calls[name]()
            except Exception as error:
                samples[name].failure = first_line(error)
                continue
            spent[name] += clock() - start
            samples[name].wall.append(wall)
            samples[name].cpu.append(cpu)
    return samples


class Clock:
    """Measures one call of a provider in a direction on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush: torch.Tensor | None = None
        if device.type == "cuda":
            # Twice the L2 cache: written before every call, so that inputs come from memory.
            size = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(max(2 * size, 1 << 26), dtype=torch.int8, device=device)

    def sampler(
        self, function: Callable[[Inputs], Any], inputs: Inputs, direction: str, seconds: float
    ) -> Callable[[], tuple[float, float]]:
        """A call that takes one sample: (wall, CPU) seconds. seconds: about what a call takes."""
        if self.device.type == "cuda":
            return lambda: (self._events(function, inputs, direction), 0.0)
        repeats = 1 if direction == "backward" else max(1, round(SHORTEST / max(seconds, 1e-6)))
        return lambda: self._cpu(function, inputs, direction, repeats)

    def _cpu(
        self, function: Callable[[Inputs], Any], inputs: Inputs, direction: str, repeats: int
    ) -> tuple[float, float]:
        before = prelude(function, inputs, direction)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(repeats):
            result = measured(function, inputs, direction, before)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        del result
        return wall / repeats, cpu / repeats

    def _events(self, function: Callable[[Inputs], Any], inputs: Inputs, direction: str) -> float:
        before = prelude(function, inputs, direction)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert self.flush is not None
        self.flush.fill_(1)
        start.record()
        result = measured(function, inputs, direction, before)
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1e3


def prelude(function: Callable[[Inputs], Any], inputs: Inputs, direction: str) -> Any:
    """What a direction needs beforehand: the backward pass alone needs a forward pass."""
    return function(inputs) if direction == "backward" else None


def measured(function: Callable[[Inputs], Any], inputs: Inputs, direction: str, before: Any = None) -> Any:
    """A direction's work."""
    if direction == "forward":
        with torch.no_grad():
            return function(inputs)
    return gradients(before if direction == "backward" else function(inputs), inputs)


def gradients(outputs: dict[str, torch.Tensor], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Gradients of the leaves: of the loss, or of log-probs and entropies under the workload's upstream gradients."""
    if "loss" in outputs:
        chosen, upstream = [outputs["loss"]], None
    else:
        names = ["logp", "entropy"] if inputs.workload.op.endswith("entropy") else ["logp"]
        chosen = [outputs[name] for name in names]
        upstream = [inputs.upstream[name].to(outputs[name].dtype) for name in names]
    leaves = inputs.leaves
    return dict(zip(leaves, torch.autograd.grad(chosen, list(leaves.values()), upstream), strict=True))

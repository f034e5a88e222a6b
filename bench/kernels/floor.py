"""What the machine could do: the least bytes over measured copy bandwidth, the operations over measured matmul rate.

Counted on what the result needs, not on what any provider does: a masked row's logits need not be read, its gradient
has to be written; a row enters the forward matmul if its log-prob matters, the two backward matmuls if it has a
gradient. floor = max(bytes/bandwidth, operations/rate), with both rates from the same run, dtype and threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .timing import quantile
from .workloads import DTYPES, LINEAR_OPS, LOGITS_OPS, LOSS_OPS, Inputs


def bytes_moved(inputs: Inputs, direction: str) -> int:
    """Least bytes read and written."""
    workload = inputs.workload
    n, itemsize = workload.rows, DTYPES[workload.dtype].itemsize
    if workload.op in LOGITS_OPS:
        row = workload.vocab * itemsize
        read, written = row * rows_needed(inputs), row * n
        per_token = 4 * n * 4
        if direction == "forward":
            return read + per_token
        if direction == "backward" or workload.op in LOSS_OPS:
            return read + written + per_token
        return 2 * read + written + per_token
    if workload.op in LINEAR_OPS:
        size = (workload.vocab + n) * workload.hidden_size * itemsize
        return size if direction == "forward" else 2 * size
    # Element-wise: float32 numbers, one byte of mask, eight bytes an id.
    per_entry = {
        "policy_loss": {"forward": 13, "backward": 8, "both": 17},
        "group_advantages": {"forward": 16},
        "step_advantages": {"forward": 32},
        "gae": {"forward": 13},
        "discounted_returns": {"forward": 8},
        "masked_whiten": {"forward": 9},
    }
    return n * per_entry[workload.op][direction]


def operations(inputs: Inputs, direction: str) -> int:
    """Multiplications and additions of the matmuls."""
    workload = inputs.workload
    if workload.op not in LINEAR_OPS:
        return 0
    matmul = 2 * workload.vocab * workload.hidden_size
    forward, backward = matmul * rows_needed(inputs), 2 * matmul * rows_moved(inputs)
    if direction == "forward":
        return forward
    if direction == "both":
        return forward + backward
    # Alone, the backward pass has to make the logits again: they are not kept.
    return matmul * rows_moved(inputs) + backward


def rows_needed(inputs: Inputs) -> int:
    """Rows whose log-prob matters to the loss or its gradient (all, for log-probs)."""
    if inputs.workload.op not in LOSS_OPS:
        return inputs.workload.rows
    return int((inputs.mask & (inputs.advantages != 0)).sum())


def rows_moved(inputs: Inputs) -> int:
    """Rows with a gradient: needed, and not clipped."""
    if inputs.workload.op not in LOSS_OPS:
        return inputs.workload.rows
    clipped = inputs.log_ratio.abs() > 0.4
    return int((inputs.mask & (inputs.advantages != 0) & ~clipped).sum())


@dataclass
class Rates:
    """Measured rates of a device, each dtype and hidden size once."""

    device: torch.device
    quick: bool = False
    copy: dict[str, float] = field(default_factory=dict)
    matmul: dict[tuple[str, int], float] = field(default_factory=dict)

    def seconds(self, inputs: Inputs, direction: str) -> float:
        """The floor of a workload in a direction."""
        dtype = inputs.workload.dtype
        by_bytes = bytes_moved(inputs, direction) / self.bytes_per_second(dtype)
        count = operations(inputs, direction)
        return max(by_bytes, count / self.operations_per_second(dtype, inputs.workload.hidden_size) if count else 0.0)

    def bytes_per_second(self, dtype: str) -> float:
        """Read and written by a copy larger than any cache."""
        if dtype not in self.copy:
            count = 1 << (30 if self.device.type == "cuda" else 25 if self.quick else 28)
            source = torch.ones(count // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=self.device)
            target = torch.empty_like(source)
            self.copy[dtype] = 2 * count / self._seconds(lambda: target.copy_(source))
        return self.copy[dtype]

    def operations_per_second(self, dtype: str, size: int) -> float:
        """Of [rows, size]·[size, columns]; on the CPU of float32 where that is faster than the dtype's own."""
        key = (dtype, size)
        if key not in self.matmul:
            rows, columns = (8192, 32768) if self.device.type == "cuda" else (256, 4096) if self.quick else (512, 8192)
            a = torch.randn(rows, size, device=self.device).to(DTYPES[dtype])
            b = torch.randn(columns, size, device=self.device).to(DTYPES[dtype])
            rate = 2 * rows * columns * size / self._seconds(lambda: a @ b.t())
            if self.device.type == "cpu" and dtype != "fp32":
                rate = max(rate, self.operations_per_second("fp32", size))
            self.matmul[key] = rate
        return self.matmul[key]

    def _seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(3 if self.quick else 7):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
        return quantile(times[1:], 0.5)

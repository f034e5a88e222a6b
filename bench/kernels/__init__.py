"""The suite `kernels`: time and peak memory of every op beside eager and compiled PyTorch and the field's libraries.

    python -m bench kernels [--device cpu|cuda] [--quick] [--peers eager liger ...] [--budget SECONDS] [--threads N]

Each provider is first checked against the float64 reference on the same inputs; one that is wrong is not timed. Ratios:

    vs best     ours: time of the fastest peer / our time (> 1: ours is faster); a peer: its time / the fastest time
    vs floor    time / max(bytes that must move / copy bandwidth, operations / matmul rate), rates of the same run
    error       ‖result - reference‖ / ‖reference‖, the largest of outputs and gradients
    peak        memory beyond the inputs during a call, its gradients included

The report is written after every workload. A run that is interrupted (Ctrl-C) ends with what it has.

On the CPU, wall time with --threads threads: by default as many as there are cores, which is how people run it. CPU
time is in the JSON beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..report import Report, environment
from .cases import BUDGET, cases
from .engine import Settings, not_run, run_workload
from .floor import Rates
from .picture import draw
from .present import summary, table
from .providers import libraries
from .timing import first_line
from .workloads import Workload

__all__ = ["add_arguments", "plot", "run", "summary", "table"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="no further workload begins after this long")
    parser.add_argument("--threads", type=int, metavar="N", help="threads on the CPU; default: all cores")
    parser.add_argument("--ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")


def run(options: argparse.Namespace) -> Report:
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --device cpu")
    if device.type == "cuda":
        # What training code sets; float32 matmuls stay float32.
        torch.backends.cuda.matmul.allow_tf32 = False
    threads = options.threads or torch.get_num_threads()
    chosen = [w for w in cases(device.type, options.quick) if not options.ops or w.op in options.ops]
    memory = not options.no_memory
    return measure(chosen, device, threads, options.quick, options.budget, options.peers, memory, options.keep)


def measure(
    workloads: list[Workload],
    device: torch.device,
    threads: int,
    quick: bool,
    budget: float | None = None,
    peers: list[str] | None = None,
    memory: bool = True,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """A report of these workloads, in their order, until the budget of seconds is used up or the run is interrupted.

    keep: called with what there is after each workload.
    """
    unknown = set(peers or ()) - set(libraries())
    if unknown:
        raise SystemExit(f"--peers: {', '.join(sorted(unknown))} unknown; there are {', '.join(libraries())}")
    budget = BUDGET[device.type, quick] if budget is None else budget
    directions = sum(len(w.directions) for w in workloads)
    # Checks, compilers and memory take more than half of a run; about eight providers share the rest.
    share = min(2.0, 0.4 * budget / max(1, directions) / 8)
    least = 2 if quick else 3
    settings = Settings(device, threads, share, least, peers=peers, memory=memory, compilers=not quick)
    torch.set_num_threads(threads)
    rates, start = Rates(device, quick), time.perf_counter()
    report = Report("kernels", device.type, environment(device))
    report.settings = {
        "threads": threads if device.type == "cpu" else None,
        "quick": quick,
        "budget_s": budget,
        "share_s": round(share, 3),
        "peers": peers,
        "interrupted": False,
    }
    for workload in workloads:
        elapsed = time.perf_counter() - start
        if report.settings["interrupted"] or elapsed > budget:
            reason = "interrupted" if report.settings["interrupted"] else f"the budget of {budget:g} s was used up"
            report.rows += not_run(workload, settings, reason)
            continue
        print(f"{elapsed:4.0f} s  {workload.op}, {workload.shape}, {workload.kind}, {workload.dtype}", file=sys.stderr)
        try:
            report.rows += run_workload(workload, settings, rates)
        except KeyboardInterrupt:
            report.settings["interrupted"] = True
            report.rows += not_run(workload, settings, "interrupted")
        except Exception as error:
            # Its inputs or its reference, e.g. for want of memory: no reason to lose the others.
            report.rows += [row | {"fault": True} for row in not_run(workload, settings, first_line(error))]
        report.settings |= _measured(rates, time.perf_counter() - start)
        keep(report)
    return report


def _measured(rates: Rates, seconds: float) -> dict[str, Any]:
    """What the settings of a report have of the run so far."""
    return {
        "seconds": round(seconds, 1),
        "copy_GB_per_s": {dtype: round(rate / 1e9, 1) for dtype, rate in rates.copy.items()},
        "matmul_GFLOP_per_s": {f"{d}, {size}": round(rate / 1e9, 1) for (d, size), rate in rates.matmul.items()},
    }


def plot(report: Report, path: Path) -> None:
    draw(report, path)

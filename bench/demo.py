"""What `make demo` shows, over the paper's seeds: success before and after, with its cost.

Each seed is the demo itself, started from nothing in a process of its own. Success is on 512 episodes of held-out tasks
at the rollout temperature, with its 95 % interval; other seeds differ by more than that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .report import Report, environment, markdown

SEEDS = (0, 200, 400)
QUICK_STEPS = 3
CURVES = ("step", "success", "dense_return", "trajectories")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="seeds at once (default: cores)")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-demo"), help="run folders (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Run the demo with every seed."""
    flags = ["--steps", str(QUICK_STEPS)] if options.quick else []
    folders = [options.runs / f"seed-{seed}" for seed in SEEDS]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda seed, folder: row(seed, folder, flags), SEEDS, folders))
    return Report("demo", "cpu", environment("cpu"), {"jobs": options.jobs}, rows)


def row(seed: int, folder: Path, flags: list[str]) -> dict[str, Any]:
    """One seed's demo. Raises RuntimeError with its last words where it failed."""
    from rspo.runs.records import read_metrics

    began = time.perf_counter()
    command = [sys.executable, "-m", "rspo.cli.demo", "--out", str(folder), "--seed", str(seed), *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the demo with seed {seed} failed: {result.stderr[-2000:]}")
    evaluations = read_metrics(folder, "evaluation")
    first, *_, last = evaluations
    values = {name: last[name] for name in ("success", "success_low", "success_high", "trajectories", "tokens")}
    return {
        "seed": seed,
        "updates": last["step"],
        "start": first["success"],
        **values,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        **{f"{name} by evaluation": [record[name] for record in evaluations] for name in CURVES},
    }


def table(report: Report) -> str:
    """The seeds as Markdown."""
    return f"# The demo\n\n{summary(report)}\n\n{report.caption}"


def summary(report: Report) -> str:
    """The table alone."""
    header = (
        "seed",
        "start",
        "RSPO+GRPO",
        "95 % interval",
        "updates of A",
        "trajectories, B's included",
        "response tokens",
        "minutes",
    )
    lines = [
        (
            row["seed"],
            f"{row['start']:.1%}",
            f"{row['success']:.1%}",
            f"{row['success_low']:.1%} to {row['success_high']:.1%}",
            row["updates"],
            f"{row['trajectories']:,}",
            f"{row['tokens']:,}",
            row["minutes"],
        )
        for row in report.rows
    ]
    return markdown(header, lines)


def plot(report: Report, path: Path) -> None:
    """Success and dense return, a curve for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for row in report.rows:
        steps, success, dense, _ = (row[f"{name} by evaluation"] for name in CURVES)
        axes[0].plot(steps, [100 * value for value in success], marker="o", label=f"seed {row['seed']}")
        axes[1].plot(steps, dense, marker="o")
    axes[0].set(xlabel="updates of agent A", ylabel="success, %", title="Held-out success", ylim=(0, None))
    axes[1].set(xlabel="updates of agent A", ylabel="dense return", title="Dense return, which A never sees")
    axes[0].legend()
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""The paper's tables and figures on household: methods, ablations, reward hacking, clip centres, with their cost.

The plan (`plan.py`) fixes configurations, starts and seeds. Runs are independent, one thread each; finished ones are
kept in the report, unfinished ones go on from their checkpoints, so the suite may be stopped at any time and started
again. Success is on 512 held-out tasks; single evaluations swing by several points, so that tables give means over
the evaluations of a run as well as its last.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..execute import execute
from ..report import RESULTS, Report, environment
from .pictures import draw
from .plan import FRESH_SEEDS, PAPER_SEEDS, STARTS, plan, quick_plan
from .tables import (
    GROUPS,
    ablation_table,
    center_table,
    dense_only_table,
    equal_cost_table,
    main_table,
    select,
    states_table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once (default: cores)")
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="run folders (default: %(default)s)")


def run(options: argparse.Namespace) -> Report:
    """Make what is missing of the plan."""
    specs = quick_plan() if options.quick else plan()
    name = "paper-quick" if options.quick else "paper"
    device = "cpu"
    report = Report(name, device, environment("cpu"), {"paper_seeds": PAPER_SEEDS, "fresh_seeds": FRESH_SEEDS})
    path = (options.out or RESULTS / device) / f"{name}.json"
    done = Report.read(path).rows if path.is_file() else []

    def save(rows: list[dict[str, Any]]) -> None:
        report.rows = rows
        report.write(path)

    report.rows = execute(specs, done, options.runs / name, options.jobs, save)
    return report


def table(report: Report) -> str:
    """All tables, those without rows left out."""
    rows = report.rows
    first, *_ = STARTS
    parts = [f"# The paper's experiments on household\n\n{report.caption}"]
    planned = len(quick_plan() if report.suite.endswith("quick") else plan())
    if len(rows) < planned:
        parts.append(f"**{len(rows)} of {planned} runs are finished; tables hold what there is of them.**")
    for start in STARTS:
        if select(rows, start, "rspo"):
            parts.append(f"## Main comparison, start {start}\n\n{main_table(rows, start)}")
            parts.append(f"At equal numbers of sampled trajectories:\n\n{equal_cost_table(rows, start)}")
    for name, variants in GROUPS.items():
        parts.append(f"## {name}\n\n{ablation_table(rows, first, variants)}")
    parts.append(f"## Dense rewards alone\n\n{dense_only_table(rows, first)}")
    parts.append(f"## Clip centre of replayed tokens\n\n{center_table(rows)}")
    parts.append(f"## Repeated states per turn, in evaluations\n\n{states_table(rows, first)}")
    return "\n\n".join(parts)


def plot(report: Report, path: Path) -> None:
    draw(report.rows, path)

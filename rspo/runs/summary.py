"""What runs have come to, as a table: success before and after with its interval, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .comparison import Group, RunData, read_groups

COLUMNS = ("run", "seed", "A-updates", "start", "last", "95 %", "best", "at", "mean", "trajectories", "tokens", "time")
NONE = "-"


def summary_table(folders: Sequence[Path], labels: Sequence[str] | None = None) -> str:
    """A row for each run, and the mean (± standard deviation) of runs that differ only in their seed.

    Success is held-out success in %: before training, after the last update with its 95 % interval, the best
    evaluation and its step, and the mean over the evaluations after the start, which swings least. Trajectories and
    response tokens are those of both agents.

    Raises FileNotFoundError and ValueError as `plotting.plot_runs`.
    """
    rows: list[Sequence[str]] = [COLUMNS]
    for group in read_groups(folders, labels):
        rows += [_row(group.label, run) for run in group.runs]
        if len(group.runs) > 1:
            rows.append(_mean_row(group))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _row(label: str, run: RunData) -> list[str]:
    evaluations = [record for record in run.of_kind("evaluation") if record.get("success") is not None]
    updates = run.of_kind("update")
    steps = str(updates[-1]["step"]) if updates else "0"
    cost = run.records[-1] if run.records else {}
    if not evaluations:
        return [label, str(run.seed), steps, *[NONE] * 6, *_cost(cost)]
    last, best = evaluations[-1], max(evaluations, key=lambda record: record["success"])
    later = _later(evaluations)
    return [
        label,
        str(run.seed),
        steps,
        _percent(evaluations[0]["success"]) if evaluations[0]["step"] == 0 else NONE,
        _percent(last["success"]),
        _interval(last),
        _percent(best["success"]),
        str(best["step"]),
        _percent(float(np.mean(later))) if later else NONE,
        *_cost(cost),
    ]


def _mean_row(group: Group) -> list[str]:
    """Means over runs; the last, best and mean success with their standard deviation over seeds."""
    successes = [
        [record["success"] for record in run.of_kind("evaluation") if record.get("success") is not None]
        for run in group.runs
    ]
    lengths = {updates[-1]["step"] if (updates := run.of_kind("update")) else 0 for run in group.runs}
    unequal = " (of unequal length)" if len(lengths) > 1 else ""
    means = [float(np.mean(later)) for run in group.runs if (later := _later(run.of_kind("evaluation")))]
    return [
        f"{group.label}, mean of {len(group.runs)}{unequal}",
        *["", ""],
        _percent(float(np.mean([s[0] for s in successes if s]))) if any(successes) else NONE,
        _spread([s[-1] for s in successes if s]),
        "",
        _spread([max(s) for s in successes if s]),
        "",
        _spread(means),
        *_cost(
            {
                name: float(np.mean([run.records[-1][name] for run in group.runs if run.records]))
                for name in ("trajectories", "tokens", "seconds")
                if any(run.records for run in group.runs)
            }
        ),
    ]


def _later(evaluations: Sequence[Mapping[str, Any]]) -> list[float]:
    """Success at the evaluations after the start."""
    return [record["success"] for record in evaluations if record["step"] > 0 and record.get("success") is not None]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return NONE
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


def _interval(record: Mapping[str, Any]) -> str:
    if "success_low" not in record:
        return NONE
    return f"{_percent(record['success_low'])} to {_percent(record['success_high'])}"


def _cost(record: Mapping[str, Any]) -> list[str]:
    if "trajectories" not in record:
        return [NONE] * 3
    minutes, seconds = divmod(round(record["seconds"]), 60)
    return [f"{record['trajectories']:,.0f}", f"{record['tokens']:,.0f}", f"{minutes}:{seconds:02d}"]

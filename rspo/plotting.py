"""Learning curves of one or several runs, from their `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: works without a display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .tracking import read_metrics

Records = list[dict[str, Any]]


def plot_runs(folders: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Draw held-out success against A-updates and against sampled trajectories, dense return, and KL.

    Both axes of success matter: agent B's trajectories are not free, and only the second axis counts them.

    Returns the written file. Raises FileNotFoundError for a folder without metrics, ValueError for no folder or
    another number of labels.
    """
    if not folders:
        raise ValueError("plot_runs needs at least one run folder")
    if labels is not None and len(labels) != len(folders):
        raise ValueError(f"labels must be as many as folders ({len(folders)}), got {len(labels)}")
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for folder, label in zip(folders, labels or [folder.name for folder in folders], strict=True):
        records = read_metrics(folder)
        evaluations = [record for record in records if record["kind"] == "evaluation"]
        updates = [record for record in records if record["kind"] == "update"]
        (line,) = axes[0, 0].plot(_column(evaluations, "step"), _percent(evaluations), marker="o", label=label)
        color = line.get_color()
        axes[0, 0].plot(_column(updates, "step"), _percent(updates), color=color, alpha=0.3, linewidth=1)
        axes[0, 1].plot(_column(evaluations, "trajectories"), _percent(evaluations), color=color, marker="o")
        axes[1, 0].plot(_column(updates, "step"), _column(updates, "dense_return"), color=color)
        axes[1, 1].plot(_column(updates, "step"), _column(updates, "approx_kl_k3"), color=color)
    _name(axes[0, 0], "updates of agent A", "success, % (thin: while training)", "Held-out success")
    _name(axes[0, 1], "sampled trajectories, agent B's included", "success, %", "The same, by cost")
    _name(axes[1, 0], "updates of agent A", "dense return", "Dense return of agent A's trajectories")
    _name(axes[1, 1], "updates of agent A", "KL(old, new), nats per token", "Size of an update")
    axes[0, 0].legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
    return out


def _column(records: Records, name: str) -> list[float]:
    return [record[name] for record in records]


def _percent(records: Records) -> list[float]:
    return [100 * record["success"] for record in records]


def _name(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.locator_params(axis="x", nbins=6)
    axes.grid(alpha=0.3)

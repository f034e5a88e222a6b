"""The picture of the paper suite: success against updates and against cost, reward hacking, clip centres."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from .plan import CENTERS, DENSE_ONLY, MAIN, STARTS
from .tables import Row, mean_success, of_main, select


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bands are one standard deviation over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    start = next(iter(STARTS))
    for i, (name, (method, base)) in enumerate(MAIN.items()):
        runs = select(of_main(rows, start), start, method, base)
        if runs:
            style: dict[str, Any] = {"color": f"C{i // 2}", "linestyle": "-" if method == "rspo" else "--"}
            _curve(axes[0, 0], runs, "step", "success", style, name, scale=100)
            _curve(axes[0, 1], runs, "trajectories", "success", style, name, scale=100)
    _name(axes[0, 0], "updates of agent A", "success, %", f"Held-out success, start {start}")
    _name(axes[0, 1], "sampled trajectories, agent B's included", "success, %", "The same, by cost")
    axes[0, 0].legend(fontsize=8)

    dense = select(rows, start, "grpo", flags=DENSE_ONLY)
    if dense:
        _curve(axes[1, 0], dense, "step", "success", {"color": "C3"}, "success, %", scale=100)
        twin = axes[1, 0].twinx()
        _curve(twin, dense, "step", "dense_return", {"color": "C7"}, "dense return")
        twin.set_ylabel("dense return")
    _name(axes[1, 0], "updates", "success, %", "Trained on dense rewards alone")
    _bars(axes[1, 1], rows)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curve(
    axes: Axes, runs: Sequence[Row], x: str, y: str, style: dict[str, Any], label: str, scale: float = 1.0
) -> None:
    length = min(len(row[x]) for row in runs)
    where = np.mean([row[x][:length] for row in runs], axis=0)
    values = scale * np.array([row[y][:length] for row in runs])
    axes.plot(where, values.mean(0), label=label, **style)
    if len(runs) > 1:
        deviation = values.std(0, ddof=1)
        axes.fill_between(
            where, values.mean(0) - deviation, values.mean(0) + deviation, color=style["color"], alpha=0.12, linewidth=0
        )


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Mean success of each clip centre, seeds as dots."""
    places = np.arange(len(CENTERS))
    for i, start in enumerate(STARTS):
        for place, flags in zip(places, CENTERS.values(), strict=True):
            seeds = {row["seed"] for row in select(rows, start, "rspo", flags=CENTERS["none"])}
            runs = [row for row in select(rows, start, "rspo", flags=flags) if row["seed"] in seeds]
            values = [mean_success(row) for row in runs]
            if values:
                at = place + 0.4 * i - 0.2
                axes.bar(at, np.mean(values), width=0.36, color=f"C{i}", alpha=0.5, label=start if place == 0 else None)
                axes.plot([at] * len(values), values, "o", color=f"C{i}", markersize=3)
    axes.set_xticks(places, [name.replace(" (", "\n(") for name in CENTERS], fontsize=8)
    _name(axes, "", "mean success, %", "Clip centre of replayed tokens")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="start", fontsize=8)


def _name(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)

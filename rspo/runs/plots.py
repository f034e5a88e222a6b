"""Learning curves of one or several runs, from their `metrics.jsonl`. Runs that differ only in their seed are one
curve, the mean, with a band from the lowest to the highest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: works without a display
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .comparison import Group, RunData, read_groups


@dataclass(frozen=True)
class Curve:
    """A name in the records, and how it is drawn.

    label: tells it from the panel's other curves.  inner, outer: names whose values bound bands around it, which are
    then quantiles of one run instead of the spread over runs.  or_zero: 0 throughout means that there is none.
    """

    name: str
    label: str = ""
    style: str = "-"
    inner: tuple[str, str] | None = None
    outer: tuple[str, str] | None = None
    or_zero: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes. kind: of the records.  x: the name along the x axis."""

    title: str
    y: str
    curves: tuple[Curve, ...]
    kind: str = "update"
    x: str = "step"
    scale: float = 1.0


def _low_and_high(prefix: str) -> tuple[Curve, ...]:
    return Curve(f"{prefix}clip_frac_low", "below, A < 0"), Curve(f"{prefix}clip_frac_high", "above, A > 0", "--")


_CENTER = Curve(
    "replay/log_center_q50",
    inner=("replay/log_center_q25", "replay/log_center_q75"),
    outer=("replay/log_center_q05", "replay/log_center_q95"),
)
PANELS = {
    "success": Panel("Held-out success", "%", (Curve("success"),), "evaluation", scale=100),
    "cost": Panel("Held-out success by cost", "%", (Curve("success"),), "evaluation", "trajectories", scale=100),
    "reward": Panel("Outcome reward in training", "reward", (Curve("reward"),)),
    "dense": Panel("Dense return in training", "dense return", (Curve("dense_return"),)),
    "clip": Panel("Clipped tokens", "% of tokens", _low_and_high(""), scale=100),
    "replay-clip": Panel("Clipped tokens, replayed", "% of tokens", _low_and_high("replay/"), scale=100),
    "center": Panel("Clip centre, replayed", "log c, nats", (_CENTER,)),
    "kl": Panel(
        "KL", "nats per token", (Curve("approx_kl_k3", "old, new"), Curve("kl_ref", "start policy", "--", or_zero=True))
    ),
    "entropy": Panel("Entropy", "nats per token", (Curve("entropy"),)),
    "states": Panel("Identical states", "per turn", (Curve("identical_states_per_turn"),)),
    "no-advantage": Panel(
        "Trajectories without advantage",
        "%",
        (Curve("zero_advantages", "on-policy"), Curve("replay/zero_advantages", "replayed", "--")),
        scale=100,
    ),
    "gradient": Panel("Gradient norm", "norm", (Curve("gradient_norm"),)),
}
"""The panels there are, by the names that they are chosen by."""
STYLE = {"font.size": 10.5, "axes.titlesize": 11.5, "axes.spines.top": False, "axes.spines.right": False}
X_LABELS = {"step": "updates of agent A", "trajectories": "sampled trajectories, agent B's included"}


def plot_runs(
    folders: Sequence[Path], out: Path, labels: Sequence[str] | None = None, panels: Sequence[str] | None = None
) -> Path:
    """Draw runs into a picture. Success has two x axes, because agent B's trajectories are not free.

    Args:
        folders: of the runs, which may still be under way.
        out: the picture; its suffix says of what kind.
        labels: one for each run, instead of those made of the settings; runs with equal labels are one curve.
        panels: names in PANELS; default: all for which there is something to draw.

    Returns:
        `out`.

    Raises:
        FileNotFoundError: a folder without metrics.
        ValueError: no folder, another number of labels, an unknown panel, or nothing to draw in any run.
    """
    for name in panels or ():
        if name not in PANELS:
            raise ValueError(f"panels must be some of {', '.join(PANELS)}, got {name!r}")
    groups = read_groups(folders, labels)
    drawn = [PANELS[name] for name in panels or PANELS if _drawn(PANELS[name], groups)]
    if not drawn:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"nothing to draw yet: there are no records of updates or evaluations in {names}")
    columns = min(3 if len(drawn) > 4 else 2, len(drawn))
    rows = -(-len(drawn) // columns)
    with plt.rc_context(
        {"font.size": 10.5, "axes.titlesize": 11.5, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, grid = plt.subplots(rows, columns, figsize=(11, 0.9 + 2.9 * rows), layout="constrained", squeeze=False)
        for axes, panel in zip(grid.flat, drawn, strict=False):
            for number, group in enumerate(groups):
                _draw(axes, panel, group, f"C{number}")
            _finish(axes, panel, _drawn(panel, groups))
        for axes in grid.flat[len(drawn) :]:
            axes.set_axis_off()
        handles = [Line2D([], [], color=f"C{i}", linewidth=2, label=_legend(group)) for i, group in enumerate(groups)]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 3), frameon=False)
        figure.supxlabel(_caption(groups, drawn), fontsize=9.5, color="0.3")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=110)
        plt.close(figure)
    return out


def _draw(axes: Axes, panel: Panel, group: Group, color: str) -> None:
    """The curves of a group, as far as all of its runs have come; beyond that each run's own, thin."""
    marker = "o" if panel.kind == "evaluation" else None
    for curve in panel.curves:
        tables = [table for run in group.runs if (table := points(run, panel, curve))]
        if not tables:
            continue
        shared = sorted(set.intersection(*(set(table) for table in tables)))
        x = [np.mean([table[step][0] for table in tables]) for step in shared]
        y = np.array([[table[step][1] for step in shared] for table in tables])
        axes.plot(x, y.mean(0), curve.style, color=color, marker=marker, markersize=3.5)
        bounds = [bound for bound in (curve.inner, curve.outer) if bound is not None]
        for low, high in bounds:
            _quantile_band(axes, panel, group, (low, high), color)
        if len(tables) > 1 and not bounds:
            axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.18, linewidth=0)
        for table in tables:
            rest = [step for step in sorted(table) if not shared or step >= shared[-1]]
            if len(rest) > 1:
                axes.plot(*zip(*(table[step] for step in rest), strict=True), curve.style, color=color, linewidth=0.7)


def _quantile_band(axes: Axes, panel: Panel, group: Group, names: tuple[str, str], color: str) -> None:
    low, high = ([points(run, panel, Curve(name)) for run in group.runs] for name in names)
    tables = [table for table in (*low, *high) if table]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if shared:
        x = [np.mean([table[step][0] for table in tables]) for step in shared]
        bottom, top = ([np.mean([t[step][1] for t in side if t]) for step in shared] for side in (low, high))
        axes.fill_between(x, bottom, top, color=color, alpha=0.15, linewidth=0)


def points(run: RunData, panel: Panel, curve: Curve) -> dict[int, tuple[float, float]]:
    """(x, y) of a run's curve at each step where there are both."""
    found: dict[int, tuple[float, float]] = {}
    for record in run.of_kind(panel.kind):
        x, y = record.get(panel.x), record.get(curve.name)
        if x is not None and y is not None:
            found[record["step"]] = (x, panel.scale * y)
    return {} if curve.or_zero and not any(y for _, y in found.values()) else found


def _drawn(panel: Panel, groups: Sequence[Group]) -> list[Curve]:
    """The panel's curves of which some run has points."""
    return [c for c in panel.curves if any(points(run, panel, c) for group in groups for run in group.runs)]


def _finish(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    """Names, a grid, and a key to line styles where there are several."""
    axes.set(xlabel=X_LABELS[panel.x], ylabel=panel.y, title=panel.title)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if panel.x == "trajectories":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x else "0"))
    axes.grid(alpha=0.25)
    if len(panel.curves) > 1:
        keys = [Line2D([], [], color="0.35", linestyle=curve.style, label=curve.label) for curve in curves]
        axes.legend(handles=keys, fontsize=9, frameon=False)


def _legend(group: Group) -> str:
    started = [run for run in group.runs if run.records]
    if not started:
        return f"{group.label} (no records yet)"
    return group.label if len(started) == 1 else f"{group.label} ({len(started)} runs)"


def _caption(groups: Sequence[Group], panels: Sequence[Panel]) -> str:
    parts = []
    if any(len(group.runs) > 1 for group in groups):
        parts.append(
            "Line: mean over runs that differ in the seed; band: lowest to highest; thin: a run longer than the others."
        )
    if PANELS["center"] in panels:
        parts.append("Clip centre: median, with the middle 50 % and 90 % of the replayed tokens, means over the runs.")
    return "\n".join(parts)

"""The tables of the paper suite, from its rows: means over evaluations and seeds, costs and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..report import markdown
from .plan import ABLATIONS, CENTERS, DENSE_ONLY, MAIN, MAIN_SEEDS, STARTS, STEPS

Row = dict[str, Any]

# Success rates in the paper, Qwen2.5-1.5B: WebShop (Tables 1 to 5), and ALFWorld where it has it too.
PAPER_MAIN = {
    "GRPO": "65.1 / 69.0",
    "RSPO+GRPO": "70.6 / 74.7",
    "GiGPO": "67.4 / 88.8",
    "RSPO+GiGPO": "75.3 / 90.4",
    "PPO": "57.3 / 68.0",
    "RSPO+PPO": "69.3 / 76.6",
}
PAPER_ABLATIONS = {
    "sampling=random": 12.8,
    "sampling=variance": 63.0,
    "sampling=reward": 70.6,
    "RSPO_H": 57.0,
    "RSPO_O": 64.1,
    "RSPO": 70.6,
    "α=1/16": 67.2,
    "α=1/8": 66.4,
    "α=1/4": 54.7,
    "α=1/2": 60.9,
    "k=1": 65.6,
    "k=3": 66.4,
    "k=5": 61.7,
    "k=10": 61.7,
    "σ=0": 67.2,
    "σ=0.1": 64.1,
    "σ=0.3": 60.9,
}
GROUPS = {
    "Sampling": ("sampling=reward", "sampling=variance", "sampling=random"),
    "Sources": ("RSPO", "RSPO_O", "RSPO_H"),
    "α": ("α=1/16", "α=1/8", "α=1/4", "α=1/2"),
    "k": ("k=1", "k=3", "k=5", "k=10"),
    "Noise": ("σ=0", "σ=0.1", "σ=0.3"),
}
"""Ablations by table; what is not in ABLATIONS is the plain run."""


def select(rows: Sequence[Row], start: str, method: str, base: str = "grpo", flags: Sequence[str] = ()) -> list[Row]:
    """The runs of a configuration, by seed."""
    wanted = (start, method, list(flags))
    found = [row for row in rows if (row["start"], row["method"], row["flags"]) == wanted]
    return sorted((row for row in found if method != "rspo" or row["base"] == base), key=lambda row: row["seed"])


def of_main(rows: Sequence[Row], start: str) -> list[Row]:
    """The rows with the main comparison's seeds: RSPO+GRPO has run with those of the clip centres too, and a mean over
    other seeds than its neighbours' would compare starts."""
    return [row for row in rows if row["start"] == start and row["seed"] in MAIN_SEEDS[start]]


def mean_success(row: Row, until: int | None = None) -> float:
    """Success in %, mean over the evaluations after the first, up to an update."""
    values = [s for step, s in zip(row["step"], row["success"], strict=True) if 0 < step <= (until or row["steps"])]
    return 100.0 * float(np.mean(values))


def success_at(row: Row, step: int) -> float:
    """Success in % at the last evaluation up to an update."""
    return 100.0 * [s for at, s in zip(row["step"], row["success"], strict=True) if at <= step][-1]


def success_at_cost(row: Row, trajectories: int) -> float:
    """Success in % at the last evaluation that cost at most so many trajectories."""
    return 100.0 * [s for t, s in zip(row["trajectories"], row["success"], strict=True) if t <= trajectories][-1]


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation, or the single value."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def paired(ours: Sequence[Row], others: Sequence[Row], until: int | None = None) -> str:
    """Mean difference over the seeds that both have, with its standard error."""
    by_seed = {row["seed"]: mean_success(row, until) for row in others}
    gaps = [mean_success(row, until) - by_seed[row["seed"]] for row in ours if row["seed"] in by_seed]
    if len(gaps) < 2:
        return f"{gaps[0]:+.1f}" if gaps else "–"
    return f"{np.mean(gaps):+.1f} ({np.std(gaps, ddof=1) / math.sqrt(len(gaps)):.1f})"


def main_table(rows: Sequence[Row], start: str) -> str:
    """The main comparison at equal A-updates, and what it cost."""
    rows = of_main(rows, start)
    lines = []
    for name, (method, base) in MAIN.items():
        runs = select(rows, start, method, base)
        if not runs:
            continue
        until = min(STEPS, max(row["step"][-1] for row in runs))
        plain = select(rows, start, base if method == "rspo" else method)
        ends = [[c for at, c in zip(row["step"], row["trajectories"], strict=True) if at <= until][-1] for row in runs]
        tokens = [[c for at, c in zip(row["step"], row["tokens"], strict=True) if at <= until][-1] for row in runs]
        lines.append(
            (
                name,
                len(runs),
                spread([mean_success(row, until) for row in runs]),
                spread([success_at(row, until) for row in runs]),
                paired(runs, plain, until) if method == "rspo" else "–",
                f"{np.mean(ends):,.0f}",
                f"{np.mean(tokens):,.0f}",
                PAPER_MAIN[name],
            )
        )
    header = (
        "method",
        "seeds",
        "mean success, %",
        "at the end, %",
        "against its base (SE)",
        "trajectories",
        "response tokens",
        "paper, WebShop / ALFWorld",
    )
    return markdown(header, lines)


def equal_cost_table(rows: Sequence[Row], start: str) -> str:
    """Base methods and RSPO with the same number of sampled trajectories."""
    rows = of_main(rows, start)
    lines = []
    for name, (method, base) in MAIN.items():
        swapped = select(rows, start, "rspo", base if method == "rspo" else method)
        runs = select(rows, start, method, base)
        if not runs or not swapped:
            continue
        budget = min(row["trajectories"][-1] for row in [*runs, *swapped])
        lines.append((name, f"{budget:,}", spread([success_at_cost(row, budget) for row in runs])))
    return markdown(("method", "trajectories", "success, %"), lines)


def ablation_table(rows: Sequence[Row], start: str, names: Sequence[str]) -> str:
    """Variants of RSPO+GRPO beside the paper's figures."""
    rows = of_main(rows, start)
    plain = select(rows, start, "rspo")
    lines = []
    for name in names:
        runs = select(rows, start, "rspo", flags=ABLATIONS[name]) if name in ABLATIONS else plain
        if not runs:
            continue
        zero = [row["replay_zero_advantages"] for row in runs if row["replay_zero_advantages"] is not None]
        lines.append(
            (
                name,
                len(runs),
                spread([mean_success(row) for row in runs]),
                spread([success_at(row, row["steps"]) for row in runs]),
                paired(runs, plain) if name in ABLATIONS else "–",
                f"{np.mean([row['trajectories'][-1] for row in runs]):,.0f}",
                f"{100 * np.mean(zero):.0f}" if zero else "–",
                PAPER_ABLATIONS[name],
            )
        )
    header = (
        "variant",
        "seeds",
        "mean success, %",
        "at the end, %",
        "against RSPO+GRPO (SE)",
        "trajectories",
        "replay without advantage, %",
        "paper, %",
    )
    return markdown(header, lines)


def center_table(rows: Sequence[Row]) -> str:
    """The clip centre of replayed tokens, at both starts, paired against the paper's."""
    lines = []
    for name, flags in CENTERS.items():
        cells: list[Any] = [name]
        for start in STARTS:
            seeds = {row["seed"] for row in select(rows, start, "rspo", flags=CENTERS["none"])}
            runs = [row for row in select(rows, start, "rspo", flags=flags) if row["seed"] in seeds]
            shift = select(rows, start, "rspo", flags=CENTERS["shift (paper)"])
            is_shift = name == "shift (paper)"
            cells += [len(runs), spread([mean_success(row) for row in runs]), "–" if is_shift else paired(runs, shift)]
        lines.append(cells)
    header = ["centre"]
    for start in STARTS:
        header += [f"seeds, start {start}", "mean success, %", "against shift (SE)"]
    return markdown(header, lines)


def dense_only_table(rows: Sequence[Row], start: str) -> str:
    """Reward hacking: what dense rewards alone do to success and to themselves, evaluation by evaluation."""
    runs = select(rows, start, "grpo", flags=DENSE_ONLY)
    lines = []
    for i, step in enumerate(runs[0]["step"] if runs else []):
        success = [100 * row["success"][i] for row in runs]
        lines.append((step, spread(success), spread([row["dense_return"][i] for row in runs])))
    return markdown(("update", "success, %", "dense return"), lines)


def states_table(rows: Sequence[Row], start: str) -> str:
    """Repeated states of evaluations, per turn: the paper counts them over training batches of unequal size."""
    rows = of_main(rows, start)
    lines = []
    for name in ("GRPO", "RSPO+GRPO"):
        runs = select(rows, start, *MAIN[name])
        cells: list[Any] = [name]
        for step in (0, 18, 36, 54):
            values = [row["identical_states_per_turn"][row["step"].index(step)] for row in runs if step in row["step"]]
            cells.append(f"{np.mean(values):.3f}" if values else "–")
        lines.append(cells)
    return markdown(("method", "start", "after 18", "after 36", "after 54"), lines)

"""Bytes that each Triton kernel requests from memory and writes to it, ours beside the peers': no GPU, no noise.

The kernels run in Triton's interpreter, which must be asked for before triton is imported and cannot live with its
compiler in one process: the counting is done by a process of its own (worker.py). How bytes are counted stands in
counter.py, what is counted and the floors in cases.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from ..report import Report, environment, markdown
from .cases import (
    ALL,
    BOTH,
    CLIPPED,
    LINEAR_LOGPROBS,
    LINEAR_LOSS,
    LOGPROBS,
    LOGPROBS_ENTROPY,
    LOSS,
    QUARTER,
    Shares,
)

ROOT = Path(__file__).parents[2]
OURS = "ours"
NAMES = {ALL: "all active", QUARTER: "25 % active", CLIPPED: "all active, half clipped"}
FROM_LOGITS = (LOSS, LOGPROBS, LOGPROBS_ENTROPY)

CAPTION = """\
Passes over the [N, V] matrix, reads + writes, as the kernels request them: a second read of the same row may be served
by the L2 cache. PyTorch operators on the matrix between the kernels count as well (a matmul reads its operands and
writes its result once). The **floor** is what no implementation can do without: the logits of an unmasked row are read
once and the whole gradient is written once, zeros included. To reach it a row must stay on the chip between the sum
over it and its gradient; a row of 152,000 does so only when several multiprocessors share it. Where forward and
backward are separate calls, rows with a gradient are read again."""

LINEAR_CAPTION = """\
From hidden states [N, H] and the lm_head's weight [V, H]: passes over the [N, V] matrix (by parts or in full) and over
the weight and its gradient, for one chunk of tokens, and the matmuls of PyTorch in units of 2·N·V·H operations (a
dense forward is 1, both gradients are 2; a matmul inside a Triton kernel is not in it). Floor, for matmuls by
PyTorch: logits are written and read once, their gradient is written once and read by two matmuls; without a gradient
nothing of size [N, V] need exist. Other bytes: what the Triton kernels move for each token, hidden states above all,
which a tiled matmul requests once for each tile of the vocabulary (from the L2 cache)."""

TOKEN_CAPTION = """\
Ops on vectors of tokens, turns or trajectories: bytes for each, 3/4 of them unmasked where there is a mask. Floor:
every input of an unmasked token is read once, every output is written once. The group ops look for a group's members
among all entries, so that one launch does with unsorted ids: their bytes grow with the number of entries."""


def run(options: argparse.Namespace) -> Report:
    command = [sys.executable, "-m", f"{__name__}.worker"]
    command += ["--quick"] if options.quick else []
    command += ["--peers", *options.peers] if options.peers is not None else []
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    settings = {"quick": options.quick, "peers": found["peers"]}
    return Report("traffic", "interpreter", environment("cpu"), settings, found["rows"])


def table(report: Report) -> str:
    parts = [
        f"# Traffic of the Triton kernels\n\n{CAPTION}",
        _logits_table(report),
        LINEAR_CAPTION,
        _linear_table(report),
        TOKEN_CAPTION,
        _token_table(report),
        "\n".join(_notes(report)),
        report.caption,
    ]
    return "\n\n".join(parts)


def _logits_table(report: Report) -> str:
    rows = [row for row in report.rows if row["op"] in FROM_LOGITS]
    columns = sorted({(row["vocab"], -row["active"], row["clipped"]) for row in rows})
    header = [f"{NAMES[Shares(-active, clipped)]}, V = {vocab:,}" for vocab, active, clipped in columns]
    lines = []
    for (op, direction), of_op in groupby(rows, key=lambda row: (row["op"], row["direction"])):
        cells: dict[str, dict[Any, str]] = {}
        for row in of_op:
            column = (row["vocab"], -row["active"], row["clipped"])
            cells.setdefault("floor", {})[column] = f"{row['floor_passes']:.2f}"
            passes = f"{row['read_passes']:.2f} + {row['write_passes']:.2f}"
            cells.setdefault(row["provider"], {})[column] = passes + (" (wrong)" if row["fault"] else "")
        lines += [[op, direction, name, *(of.get(column, "") for column in columns)] for name, of in cells.items()]
    return markdown(["op", "direction", "provider", *header], lines)


def _linear_table(report: Report) -> str:
    header = ["op", "provider", "tokens", "reads + writes", "floor", "weight passes", "matmul work", "other bytes"]
    lines = []
    for row in report.rows:
        if row["op"] in (LINEAR_LOGPROBS, LINEAR_LOSS):
            name = NAMES[Shares(row["active"], row["clipped"])]
            passes = f"{row['read_passes']:.2f} + {row['write_passes']:.2f}" + (" (wrong)" if row["fault"] else "")
            numbers = (row["floor_passes"], row["weight_passes"], row["matmul_work"])
            cells = [*(f"{number:.2f}" for number in numbers), f"{row['other_bytes_per_token']:,.0f}"]
            lines.append([row["op"], row["provider"], name, passes, *cells])
    return markdown(header, lines)


def _token_table(report: Report) -> str:
    header = ["op", "bytes", "floor", "ratio", "PyTorch's, besides"]
    keys = ("other_bytes_per_token", "floor_bytes_per_token", "ratio_to_floor", "torch_bytes_per_token")
    rows = [row for row in report.rows if row["floor_bytes_per_token"] is not None]
    return markdown(header, [[row["op"], *(f"{row[key]:.1f}" for key in keys)] for row in rows])


def _notes(report: Report) -> Iterator[str]:
    """Notes of rows, what is wrong, and what became of each peer."""
    for note in dict.fromkeys((row["provider"].split()[0], row["note"]) for row in report.rows if row["note"]):
        yield f"- {note[0]}: {note[1]}."
    for row in report.rows:
        if row["fault"]:
            yield f"- **{_key(row)}: {row['fault']}**"
    for name, peer in report.settings["peers"].items():
        yield f"- {name} {peer['version'] or ''}".rstrip() + f": {peer['status']}."


def plot(report: Report, path: Path) -> None:
    """Passes of each provider for loss and gradient from logits, reads and writes stacked, the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report.rows if row["op"] == LOSS and row["direction"] == BOTH]
    vocab = min(row["vocab"] for row in rows)
    shares = [s for s in NAMES if any((row["active"], row["clipped"]) == s for row in rows)]
    figure, panels = pyplot.subplots(1, len(shares), figsize=(3.4 * len(shares), 3.2), sharey=True, squeeze=False)
    for panel, share in zip(panels[0], shares, strict=True):
        shown = [r for r in rows if r["vocab"] == vocab and (r["active"], r["clipped"]) == share]
        names = [row["provider"].replace(" (", "\n(") for row in shown]
        reads, writes = [row["read_passes"] for row in shown], [row["write_passes"] for row in shown]
        panel.bar(names, reads, color="#4c78a8", label="read")
        panel.bar(names, writes, bottom=reads, color="#f58518", label="written")
        panel.axhline(shown[0]["floor_passes"], color="black", linestyle="--", linewidth=1, label="floor")
        for i, row in enumerate(shown):
            total = row["read_passes"] + row["write_passes"]
            panel.text(i, total, f"{total:.2f}", ha="center", va="bottom", fontsize=8)
        panel.set_title(NAMES[share], fontsize=10)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("passes over [N, V]")
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="upper right", ncols=3)
    figure.suptitle("Policy loss and its gradient from logits", x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


COMPARED = (
    "read_passes", "write_passes", "torch_passes", "weight_passes", "matmul_work",
    "other_bytes_per_token", "torch_bytes_per_token",
)  # fmt: skip


def compare(report: Report, before: Report) -> list[str]:
    """What of ours moves more than it did, what is new and what is gone; a peer's rows where its version is the same.

    A quick run has few rows: nothing is missed in it.
    """
    now, then = ({_key(row): row for row in r.rows if _comparable(row, report, before)} for r in (report, before))
    found = [f"{key}: not in the table" for key in now if key not in then]
    if not report.settings["quick"]:
        found += [f"{key}: only in the table" for key in then if key not in now]
    for key in now.keys() & then.keys():
        for what in COMPARED:
            a, b = then[key][what], now[key][what]
            more = b is not None and (a is None or b > a)
            changed = now[key]["provider"].split()[0] != OURS and a != b
            if more or changed:
                found.append(f"{key}: {what} {b}, {a} in the table")
    return sorted(found)


def _key(row: dict[str, Any]) -> str:
    of = "" if row["active"] is None else f", {row['active']:.0%} active, {row['clipped']:.0%} clipped"
    vocab = "" if row["vocab"] is None else f", V = {row['vocab']}"
    return f"{row['op']} {row['direction']} by {row['provider']}{of}, N = {row['tokens']}{vocab}, {row['dtype']}"


def _comparable(row: dict[str, Any], report: Report, before: Report) -> bool:
    name = row["provider"].split()[0]
    if name == OURS:
        return True
    peers = [r.settings["peers"].get(name, {}) for r in (report, before)]
    return all(peer.get("status") == "counted" for peer in peers) and peers[0]["version"] == peers[1]["version"]

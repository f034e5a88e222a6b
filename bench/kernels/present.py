"""The report as Markdown: first ours against the fastest peer, then every provider."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..report import Report, markdown
from .providers import OURS

CAPTION = """\
Each provider's outputs and gradients were first held against float64 on the same inputs. Medians of interleaved calls,
with the 20 % and 80 % quantiles and the number of *calls*. *direction*: forward is without any gradient, backward
without its forward pass, both is one after the other. *vs best*: for rspo_kernels the fastest peer's time over ours
(above 1: ours is faster), for a peer its time over the fastest. *vs floor*: time over the larger of least bytes / copy
bandwidth and operations / matmul rate, as measured in the same run. *error*: ‖result − reference‖ / ‖reference‖, the
largest of outputs and gradients. *peak*: memory beyond the inputs in one call, gradients included, on the CPU in a
process of its own. *active*: fraction of unmasked tokens."""


def table(report: Report) -> str:
    """Everything."""
    parts = ["# kernels", "", report.caption, "", settings_line(report), "", CAPTION, "", summary(report)]
    for op, rows in groupby(sorted(report.rows, key=lambda r: _order(report, r["op"])), key=lambda r: r["op"]):
        header = (
            "shape", "active", "dtype", "direction", "provider", "median", "20–80 %", "calls", "error", "peak",
            "vs best", "vs floor", "note",
        )  # fmt: skip
        parts += ["", f"## {op}", "", markdown(header, [_cells(row) for row in rows])]
    return "\n".join(parts)


def summary(report: Report) -> str:
    """A line for each case: ours, the fastest peer, and the ratio."""
    lines = []
    for rows in _cases(report):
        ours = next((r for r in rows if r["library"] == OURS and r["median_ms"] is not None), None)
        peers = [r for r in rows if r["library"] != OURS and r["median_ms"] is not None]
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda r: r["median_ms"])
        lean = min((r["peak_bytes"] for r in peers if r["peak_bytes"] is not None), default=None)
        lines.append(
            (
                *(ours[k] for k in ("op", "shape", "rows", "dtype", "direction")),
                milliseconds(ours["median_ms"]), milliseconds(best["median_ms"]), best["provider"],
                ratio(ours["vs_best"]), ratio(ours["vs_floor"]), size(ours["peak_bytes"]), size(lean),
            )
        )  # fmt: skip
    header = (
        "op", "shape", "active", "dtype", "direction", "ours", "fastest peer", "which", "vs best", "vs floor",
        "our peak", "leanest peer",
    )  # fmt: skip
    return markdown(header, lines)


def settings_line(report: Report) -> str:
    s = report.settings
    threads = f"{s['threads']} threads, " if s.get("threads") else ""
    copy = ", ".join(f"{rate:g} GB/s {dtype}" for dtype, rate in s.get("copy_GB_per_s", {}).items())
    matmul = ", ".join(f"{rate:g} GFLOP/s {what}" for what, rate in s.get("matmul_GFLOP_per_s", {}).items())
    return f"{threads}{s.get('seconds', 0):g} s in all. Copy: {copy}. Matmul (dtype, H): {matmul}."


def _order(report: Report, op: str) -> int:
    return next(i for i, row in enumerate(report.rows) if row["op"] == op)


def _cases(report: Report) -> Iterator[list[dict[str, Any]]]:
    """Rows of one workload and direction each."""
    keys = ("op", "shape", "rows", "dtype", "direction")
    for _, rows in groupby(report.rows, key=lambda r: tuple(r[k] for k in keys)):
        yield list(rows)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    spread = f"{milliseconds(row['q20_ms'])}–{milliseconds(row['q80_ms'])}" if row["median_ms"] is not None else ""
    name = f"**{row['provider']}**" if row["library"] == OURS else row["provider"]
    return (
        row["shape"], row["rows"], row["dtype"], row["direction"], name, milliseconds(row["median_ms"]), spread,
        str(row["rounds"] or ""), "" if row["error"] is None else f"{row['error']:.0e}", size(row["peak_bytes"]),
        ratio(row["vs_best"]), ratio(row["vs_floor"]), row["note"].replace("|", "/"),
    )  # fmt: skip


def milliseconds(value: float | None) -> str:
    """Three digits, in µs, ms or s."""
    if value is None:
        return ""
    for factor, unit in ((1e3, "µs"), (1.0, "ms"), (1e-3, "s")):
        if value * factor < 999.5 or unit == "s":
            return f"{value * factor:.3g} {unit}"
    return ""


def size(value: int | None) -> str:
    """In MB."""
    return "" if value is None else f"{value / 1e6:.0f} MB" if value >= 1e7 else f"{value / 1e6:.1f} MB"


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"

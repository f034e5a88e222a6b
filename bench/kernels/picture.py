"""The picture: time beside ours over the active fraction, and peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..report import Report
from .providers import OURS

COLOURS = {OURS: "#c1121f", "eager": "#6b7280", "compile": "#9ca3af", "liger": "#1d6fb8", "trl": "#e08e0b",
           "verl": "#2a9d58", "cce": "#7b3fa0", "flash-attn": "#8c564b", "unsloth": "#d16ba5"}  # fmt: skip
STYLES = ("-", "--", ":", "-.")
SHORT = {
    OURS: "rspo_kernels", "torch": "PyTorch", "torch cross_entropy": "PyTorch, cross_entropy",
    "torch, rows selected": "PyTorch, rows selected", "liger fused linear": "Liger",
    "liger fused linear, compiled": "Liger, compiled", "liger triton": "Liger (Triton)", "trl chunked": "TRL chunked",
    "trl selective_log_softmax": "TRL", "verl FusedLinearForPPO": "verl", "verl linear_cross_entropy": "verl (Triton)",
    "verl logprobs_from_logits": "verl", "cut-cross-entropy, torch_compile": "cut-cross-entropy (compile)",
    "cut-cross-entropy, cce": "cut-cross-entropy", "flash-attn cross_entropy_loss": "flash-attn",
}  # fmt: skip


def draw(report: Report, path: Path) -> None:
    """Three panels, as wide as a README."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    _time(axes[0], report, "linear_policy_loss", "from hidden states (linear_policy_loss)")
    _time(axes[1], report, "logits_policy_loss", "from logits (logits_policy_loss)")
    _memory(axes[2], report)
    figure.suptitle(report.environment["machine"], fontsize=9, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _sweep(report: Report, op: str) -> list[dict[str, Any]]:
    """Timed rows of the first shape of an op, loss and gradient, masked rows only."""
    rows = [r for r in report.rows if r["op"] == op and r["direction"] == "both" and not r["natural"]]
    rows = [r for r in rows if r["median_ms"] is not None]
    return [r for r in rows if (r["shape"], r["dtype"]) == (rows[0]["shape"], rows[0]["dtype"])]


def _time(axis: Any, report: Report, op: str, title: str) -> None:
    rows = _sweep(report, op)
    axis.set_title(f"{title}\n{rows[0]['shape']}, {rows[0]['dtype']}" if rows else title, fontsize=10)
    ours = {r["active"]: r["median_ms"] for r in rows if r["library"] == OURS}
    names = list(dict.fromkeys(r["provider"] for r in rows))
    used: dict[str, int] = {}
    for name in names:
        mine = [r for r in rows if r["provider"] == name and r["active"] in ours]
        points = sorted((r["active"], r["median_ms"] / ours[r["active"]]) for r in mine)
        library = next(r["library"] for r in rows if r["provider"] == name)
        style = STYLES[used.get(library, 0) % len(STYLES)]
        used[library] = used.get(library, 0) + 1
        axis.plot(
            [100 * x for x, _ in points],
            [y for _, y in points],
            style,
            marker="o",
            markersize=4,
            color=COLOURS.get(library, "#000000"),
            linewidth=2.4 if library == OURS else 1.5,
            label=SHORT.get(name, name),
        )
    axis.set_xlabel("active tokens, %", fontsize=9)
    axis.set_ylabel("time of loss + gradient, × ours", fontsize=9)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.set_xticks(sorted({round(100 * r["active"]) for r in rows}))
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    if rows:
        axis.legend(fontsize=7.5, frameon=False, handlelength=3.2)


def _memory(axis: Any, report: Report) -> None:
    """Bars of the first shape of linear_policy_loss whose peaks are known."""
    rows = [r for r in report.rows if r["op"] == "linear_policy_loss" and r["peak_bytes"] is not None]
    rows = [r for r in rows if (r["shape"], r["rows"]) == (rows[0]["shape"], rows[0]["rows"])]
    rows.sort(key=lambda r: r["peak_bytes"], reverse=True)
    title = f"\n{rows[0]['shape']}, {rows[0]['dtype']}, {rows[0]['rows']} active" if rows else ""
    axis.set_title(f"peak memory of linear_policy_loss{title}", fontsize=10)
    names = [SHORT.get(r["provider"], r["provider"]) for r in rows]
    values = [r["peak_bytes"] / 1e6 for r in rows]
    bars = axis.barh(names, values, color=[COLOURS.get(r["library"], "#000000") for r in rows])
    axis.bar_label(bars, [f"{v:,.0f} MB" for v in values], padding=3, fontsize=8)
    axis.margins(x=0.25)
    axis.tick_params(labelsize=8)
    axis.set_xticks([])
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)

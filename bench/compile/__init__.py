"""What compilers make of each Triton kernel, ours and other libraries', from machine code; needs no GPU.

The work is rspo_kernels.compile_check; this adds the peers and writes the table that `make check` compares with.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rspo_kernels import compile_check
from rspo_kernels.compile_check import PROVIDER, TARGETS, Result

from ..report import Report, environment, markdown
from .peers import PEERS

SUITE = "compile"
DEVICE = "ahead-of-time"

SHOWN = "sm_90"
"""The target whose row kernels stand beside the peers' in the first table and the picture."""

BESIDE = {
    "log-prob": [
        (PROVIDER, "logprobs_forward_kernel", "bf16"),
        ("liger-kernel", "_selective_log_softmax_kernel", "log-prob"),
    ],
    "log-prob and entropy": [
        (PROVIDER, "logprobs_forward_kernel", "bf16 entropy=1"),
        ("trl", "_forward_kernel", "log-prob and entropy"),
    ],
    "gradient of log-prob": [
        (PROVIDER, "logprobs_backward_kernel", "bf16"),
        ("trl", "_backward_kernel", "log-prob"),
    ],
    "gradient of both": [
        (PROVIDER, "logprobs_backward_kernel", "bf16 entropy=1"),
        ("trl", "_backward_kernel", "log-prob and entropy"),
    ],
    "loss and gradient": [
        (PROVIDER, "loss_rows_kernel", "bf16 RSPO"),
        ("liger-kernel", "_grpo_loss_fwd_kernel", "loss, forward"),
        ("liger-kernel", "_grpo_loss_bwd_kernel", "loss, backward"),
    ],
    "from hidden states: log-prob": [
        (PROVIDER, "linear_logprobs_kernel", "bf16 plain"),
        ("cut-cross-entropy", "_cce_lse_forward_kernel", "log-sum-exp"),
    ],
    "from hidden states: both": [
        (PROVIDER, "linear_logprobs_kernel", "bf16 entropy"),
        ("verl", "efficient_entropy_kernel_general_mainloop", "log-prob and entropy"),
    ],
}
"""Kernels that do the same, by provider, kernel and variant; a provider's kernels after each other add up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="default: all")


def run(options: argparse.Namespace) -> Report:
    """Compile for options.target: ours, and those of options.peers that are installed. --quick: ours for one target."""
    targets = [SHOWN] if options.quick else list(options.target)
    wanted = [] if options.quick else list(PEERS) if options.peers is None else [n for n in options.peers if n in PEERS]
    results = collect(targets, wanted)
    rows = [asdict(r) | {"fault": r.fault if r.provider == PROVIDER else None} for r in results]
    rows.sort(key=lambda row: (row["provider"] != PROVIDER, row["provider"], *_place(row)))
    missing = [peer.name for name, peer in PEERS.items() if name in wanted and not peer.installed]
    settings = {"targets": targets, "peers": [PEERS[n].name for n in wanted], "missing": missing}
    return Report(SUITE, DEVICE, environment("cpu"), settings, rows)


def collect(targets: list[str], names: Iterable[str]) -> list[Result]:
    """compile_check's results of our kernels and these peers'; in another process where this one interprets Triton."""
    names = list(names)
    if os.environ.get("TRITON_INTERPRET"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            code = f"import sys, bench.compile as c; c.dump({targets!r}, {names!r}, sys.argv[1])"
            clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
            root = Path(__file__).parent.parent.parent
            subprocess.run([sys.executable, "-c", code, file.name], check=True, cwd=root, env=clean)
            return [Result.read(row) for row in json.load(file)]
    results = compile_check.check(targets)
    for name in names:
        peer = PEERS[name]
        if peer.installed:
            found = compile_check.check(targets, functools.partial(peer_variants, name))
            results += [Result.read(asdict(r) | {"provider": peer.name}) for r in found]
    return results


def dump(targets: list[str], names: list[str], path: str) -> None:
    Path(path).write_text(json.dumps([asdict(r) for r in collect(targets, names)]), encoding="utf-8")


def peer_variants(name: str) -> list[Any]:
    """The kernels of a peer; a partial of it can be sent to another process."""
    return PEERS[name].kernels()


def compare(report: Report, before: Report) -> list[str]:
    """What got worse in our kernels; with another version of Triton it is shown and does not fail.

    Peers change with their own versions, which are in the tables' heads: they are not compared.
    """
    targets = report.settings["targets"]
    then = [Result.read(row) for row in before.rows if row["target"] in targets]
    found = compile_check.differences([Result.read(row) for row in report.rows], then)
    then_version, now_version = (r.environment["versions"].get("triton") for r in (before, report))
    if then_version == now_version:
        return found
    print(f"\n{len(found)} differences that do not fail, Triton {now_version} against {then_version}:")
    print("\n".join(found))
    return []


def table(report: Report) -> str:
    """Same work beside each other, then every compile."""
    rows = {_key(row): Result.read(row) for row in report.rows}
    lines = [
        "# Ahead-of-time compiles",
        "",
        report.caption.replace(f"{report.environment['machine']}; ", "") + ". No GPU was involved.",
        "",
        "An element is a logit of a row (of the other kernels: a token, reward or pair of them); its instructions are "
        "those that a thread issues for it in each pass over the elements, from the disassembly "
        "(`rspo_kernels/machine_code.py`). From hidden states it is the code around the matmul's inner loop. TRL's "
        "backward has no loop; its numbers contain the start of a program, for 8 elements a thread.",
        "",
        "*registers* of a thread; *spills* and *shared* memory in bytes; *load* and *store*: bits of one access, the "
        "narrowest of the loops; *an element*: its instructions, pass by pass. The columns after it say which: "
        "*memory* is of global memory, *threads* what threads exchange (shared memory, shuffles, barriers), *special* "
        "exponentials and reciprocals, *arithmetic* that of floating-point numbers, *other* integers, moves and jumps; "
        "*matrix*: the matmul's instruction.",
        "",
        *_missing(report),
    ]
    header: tuple[str, ...]
    if SHOWN in report.settings["targets"]:
        header = ("work", "kernels", "registers", "spills", "load", "an element", *PARTS, "all")
        lines += [f"## The same work, {SHOWN}, bf16", "", markdown(header, _beside(rows)), ""]
    header = ("kernel", "variant", "registers", "spills", "shared", "load", "store", "an element", *PARTS, "matrix")
    for target in report.settings["targets"]:
        lines += [f"## {target}", ""]
        lines += [markdown(header, (_cells(r) for r in rows.values() if r.target == target)), ""]
    return "\n".join(lines).rstrip()


PARTS = ("memory", "threads", "special", "arithmetic", "other")


def _missing(report: Report) -> list[str]:
    names = report.settings["missing"]
    return [f"Not installed, so not compiled: {', '.join(names)}.", ""] if names else []


def _key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["provider"], row["kernel"], row["variant"], row["target"]


def _place(row: dict[str, Any]) -> tuple[int, str, str]:
    return list(TARGETS).index(row["target"]), row["kernel"], row["variant"]


def _beside(rows: dict[tuple[str, str, str, str], Result]) -> Iterable[tuple[str, ...]]:
    """The first table's lines; a provider's kernels for the same work in one."""
    for work, kernels in BESIDE.items():
        for provider in dict.fromkeys(name for name, _, _ in kernels):
            found = [rows.get((*key, SHOWN)) for key in kernels if key[0] == provider]
            if None in found:
                yield (work, provider, *["missing"] + ["-"] * (len(PARTS) + 4))
                continue
            several = [r for r in found if r is not None]
            parts = [f"{sum(getattr(r, part) for r in several):.1f}" for part in PARTS]
            registers = ", ".join(str(r.registers) for r in several)
            spills = ", ".join(str(r.spills) for r in several)
            loads = ", ".join(str(r.load_bits) for r in several)
            each = " + ".join(compile_check.passes(r) for r in several)
            total = f"{sum(sum(r.passes) for r in several):.1f}"
            yield (work, provider, registers, spills, loads, each, *parts, total)


def _cells(r: Result) -> tuple[str, ...]:
    kernel = r.kernel if r.provider == PROVIDER else f"{r.provider}: {r.kernel}"
    if r.error:
        return (kernel, r.variant, "failed", *["-"] * (len(PARTS) + 5), r.error.split("\n")[0][:60])
    parts = (f"{getattr(r, part):.1f}" if r.passes else "-" for part in PARTS)
    numbers = map(str, (r.registers, r.spills, r.shared, r.load_bits, r.store_bits))
    return (kernel, r.variant, *numbers, compile_check.passes(r), *parts, r.matrix)


def plot(report: Report, path: Path) -> None:
    """Instructions for an element, by class, of the same work by different libraries."""
    from matplotlib.figure import Figure

    rows = {_key(row): Result.read(row) for row in report.rows}
    bars = [bar for bar in _beside(rows) if bar[2] != "missing"]
    if not bars:
        return
    figure = Figure(figsize=(8, 0.4 * len(bars) + 1.2), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    for i, part in enumerate(PARTS):
        widths = [float(bar[6 + i]) for bar in bars]
        axes.barh(range(len(bars)), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, (end, bar) in enumerate(zip(left, bars, strict=True)):
        axes.text(end, i, f" {bar[-1]}", va="center")
    axes.set_yticks(range(len(bars)), [f"{work}\n{provider}" for work, provider, *_ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"instructions that a thread issues for a logit, all passes ({SHOWN}, bf16)")
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)

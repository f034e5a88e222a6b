"""The documentation's figures, made of the committed result files, so that neither can say what the other does not.

    python -m bench.readme              writes the text between the markers, and the pictures anew
    python -m bench.readme --check      fails where a page is not what the result files say

Every bench/results/*/{demo,kernels,traffic,trainer}.json has its place in the README; a device's `kernels` gives a
table of the most telling cases. `paper.json` fills docs/reproduction.md, `envspeed.json` and `environments.json`
docs/environments.md; the tables of docs/scaling.md are calculated (`bench.scaling`). A ratio is the peer's time over
ours, each library by its fastest provider that was right; a peer that is ahead is in bold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from . import scaling
from .cli import suite
from .report import RESULTS, Report, markdown

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
REPRODUCTION = ROOT / "docs" / "reproduction.md"
ENVIRONMENTS = ROOT / "docs" / "environments.md"
SCALING = ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

SUITES = ("demo", "kernels", "traffic", "trainer")
"""Of the README."""
OURS = "rspo_kernels"
LIBRARIES = {
    "eager": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "trl": "TRL",
    "verl": "verl",
    "cce": "CCE",
    "flash-attn": "flash-attn",
    "unsloth": "unsloth",
}
"""Libraries of the suite `kernels` and their columns; one without any time in a report has none."""

MOST_CASES = 16
Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    reports = read(options.results)
    papers, worlds = read(options.results, ("paper",)), read(options.results, ("envspeed", "environments"))
    if not options.check:
        for path, report in [*reports.items(), *papers.items(), *worlds.items()]:
            if hasattr(suite(report.suite), "plot"):
                suite(report.suite).plot(report, path.with_suffix(".png"))
    new = {
        options.readme: section(reports, options.readme.parent),
        options.reproduction: tables(papers),
        options.environments: tables(worlds),
        options.scaling: scaling.tables(),
    }
    stale = 0
    for page, content in new.items():
        text = page.read_text(encoding="utf-8")
        wanted = replaced(text, content)
        if not options.check:
            page.write_text(wanted, encoding="utf-8")
        elif text != wanted:
            print(f"{page} is not what the result files say; `make bench-report` writes it", file=sys.stderr)
            stale = 1
    return stale


def read(folder: Path, names: Sequence[str] = SUITES) -> dict[Path, Report]:
    """The reports of suites in the folders of a results folder; GPUs first, then by name."""
    found = {path: Report.read(path) for name in names for path in folder.glob(f"*/{name}.json")}
    order = sorted(found, key=lambda path: (names.index(path.stem), found[path].device == "cpu", path.parent.name))
    return {path: found[path] for path in order}


def replaced(text: str, new: str) -> str:
    """The text with something else between the markers. Raises ValueError where they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"a page needs one {BEGIN} and after it one {END}")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{new}\n\n{text[text.index(END) :]}"


def section(reports: Mapping[Path, Report], base: Path) -> str:
    """What stands between the markers; links are relative to `base`."""
    makers = {"demo": demo, "kernels": kernels, "traffic": traffic, "trainer": trainer}
    parts = []
    for path, report in reports.items():
        body = makers[report.suite](report)
        if not body:
            continue
        folder = path.parent.relative_to(base)
        parts.append(body)
        if path.with_suffix(".png").exists() and report.suite != "trainer":
            parts.append(f"![{report.suite}]({folder / path.stem}.png)")
        parts.append(f"{_machine(report)} All of it: [{folder / path.stem}.md]({folder / path.stem}.md).")
    return "\n\n".join(parts) or "No results yet."


def tables(reports: Mapping[Path, Report]) -> str:
    """All that suites have to show, their headings a level below the page's own."""
    shown = (f"\n{suite(report.suite).table(report)}".replace("\n#", "\n##") for report in reports.values())
    return "\n\n".join(text.strip() for text in shown) or "No results yet."


def demo(report: Report) -> str:
    """Success of the demo, seed by seed."""
    note = "Success on 512 episodes of held-out tasks, before training and after it, each seed from a start of its own."
    return f"**The demo.** {note}\n\n{suite('demo').summary(report)}"


def kernels(report: Report) -> str:
    """The most telling cases: times beside ours, and peak memory."""
    cases = telling(report.rows)
    found = {row["library"] for rows in cases for row in rows if row["median_ms"] is not None}
    libraries = [library for library in LIBRARIES if library in found]
    if not cases:
        return ""
    header = ["op", "shape", "active", "dtype", "ours", *(LIBRARIES[name] for name in libraries)]
    header += ["our peak", "leanest peer"]
    lines = []
    for rows in cases:
        ours = _fastest(rows, OURS)
        assert ours is not None
        times = [_beside(_fastest(rows, library), ours, rows, library) for library in libraries]
        peaks = [r["peak_bytes"] for r in rows if r["library"] != OURS and r["peak_bytes"] is not None]
        op = ours["op"] + {"both": "", "forward": ", forward", "backward": ", backward"}[ours["direction"]]
        kind = [ours["shape"], ours["rows"], ours["dtype"]]
        memory = [_size(ours["peak_bytes"]), _size(min(peaks, default=None))]
        lines.append([op, *kind, _time(ours["median_ms"]), *times, *memory])
    behind = _behind(report.rows, cases)
    absent = [name for library, name in LIBRARIES.items() if library not in found]
    note = (
        "Time of others / our time, forward and backward (above 1: ours is faster; **bold**: the peer is ahead),"
        " medians of interleaved calls that were right; peak memory beyond the inputs in such a call, ours and that of"
        " the peer with the least. *active*: share of unmasked tokens. CCE: cut-cross-entropy."
    )
    threads = report.settings.get("threads")
    note += f" {threads} threads." if threads else ""
    note += f" Without a time here: {', '.join(absent)}." if absent else ""
    note += f" Peers are also ahead outside of this table: {'; '.join(behind)}." if behind else ""
    where = "a CPU" if report.device == "cpu" else "a GPU"
    return f"**Time and memory on {where}.** {note}\n\n{markdown(header, lines)}"


def telling(rows: Sequence[Row]) -> list[list[Row]]:
    """Cases (rows of one op, shape and direction) that ours and a peer were timed in: both directions, of each op the
    first shape in all its shares of active tokens; ops in the report's order."""
    cases: list[list[Row]] = []
    first: dict[str, tuple[str, str]] = {}
    for _, group in groupby(rows, key=lambda r: tuple(r[k] for k in ("op", "shape", "rows", "dtype", "direction"))):
        case = list(group)
        op, kind = case[0]["op"], (case[0]["shape"], case[0]["dtype"])
        timed = {row["library"] == OURS for row in case if row["median_ms"] is not None}
        if case[0]["direction"] == "both" and timed == {True, False} and first.setdefault(op, kind) == kind:
            cases.append(case)
    ops = list(first)
    return sorted(cases[:MOST_CASES], key=lambda case: (ops.index(case[0]["op"]), -case[0]["active"]))


def _behind(rows: Sequence[Row], shown: Sequence[Sequence[Row]]) -> list[str]:
    """Cases outside of the table in which a peer is faster than ours, with the ratio of the fastest, in words."""
    found: list[str] = []
    for _, group in groupby(rows, key=lambda r: tuple(r[k] for k in ("op", "shape", "rows", "dtype", "direction"))):
        case = list(group)
        ours = _fastest(case, OURS)
        peers = [row for row in case if row["library"] != OURS and row["median_ms"] is not None]
        if case in shown or ours is None or not peers:
            continue
        best = min(peers, key=lambda row: row["median_ms"])
        if best["median_ms"] < ours["median_ms"]:
            where = f"{ours['op']} {ours['direction']}, {ours['shape']}, {ours['rows']}, {ours['dtype']}"
            found.append(f"{where} ({LIBRARIES[best['library']]} {best['median_ms'] / ours['median_ms']:.2f})")
    return found


def _fastest(rows: Sequence[Row], library: str) -> Row | None:
    timed = [row for row in rows if row["library"] == library and row["median_ms"] is not None]
    return min(timed, key=lambda row: row["median_ms"], default=None)


def _beside(peer: Row | None, ours: Row, rows: Sequence[Row], library: str) -> str:
    """A peer's time over ours; where it has none, whether it was wrong or failed."""
    if peer is None:
        statuses = {row["status"] for row in rows if row["library"] == library}
        return next((status for status in ("wrong", "failed") if status in statuses), "")
    ratio = peer["median_ms"] / ours["median_ms"]
    return f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.1f}" if ratio >= 9.995 else f"{ratio:.2f}"


def traffic(report: Report) -> str:
    """Passes over the logits for loss and gradient, ours beside the peers'."""
    rows = [r for r in report.rows if r["op"] == "logits_policy_loss" and r["direction"] == "forward+backward"]
    if not rows:
        return ""
    vocab = rows[0]["vocab"]
    columns = list(dict.fromkeys((row["active"], row["clipped"]) for row in rows))
    header = [f"{active:.0%} active" + (f", {clipped:.0%} clipped" if clipped else "") for active, clipped in columns]
    cells: dict[str, dict[Any, str]] = {}
    for row in rows:
        if row["vocab"] == vocab:
            column = (row["active"], row["clipped"])
            cells.setdefault("floor", {})[column] = f"{row['floor_passes']:.2f}"
            passes = f"{row['read_passes'] + row['write_passes']:.2f}"
            cells.setdefault(row["provider"], {})[column] = "wrong" if row["fault"] else passes
    lines = [[name, *(of.get(column, "") for column in columns)] for name, of in cells.items()]
    return (
        "**Memory traffic**, counted in Triton's interpreter: passes over the [N, V] matrix, reads and writes, of the"
        f" policy loss and its gradient from logits (V = {vocab:,}). The floor is what no implementation can do"
        " without."
        f"\n\n{markdown(['provider', *header], lines)}"
    )


def trainer(report: Report) -> str:
    """Whose a training step's time is."""
    lines = [
        [row["stage"].split(",")[0], f"{1e3 * row['seconds']:,.0f} ms"]
        + [f"{row[f'share/{whose}']:.0%}" for whose in ("model", "environment", "optimizer", "ours")]
        + [f"{row['tokens_per_s']:,}"]
        for row in report.rows
        if row["stage"].endswith("in all")
    ]
    header = ["method", "an update of A", "model", "environment", "optimiser", "ours", "tokens/s"]
    return (
        "**The trainer**, household at the default sizes: where an update's time goes. *Ours* is all that is neither a"
        " pass of the model, nor the environment, nor the optimiser. RSPO's update of A comes with one of agent B and"
        f" B's share of collecting. *tokens/s*: prompts included. Threads: {report.environment['threads']}."
        f"\n\n{markdown(header, lines)}"
    )


def _machine(report: Report) -> str:
    return f"{report.caption.rstrip('.')}."


def _time(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _size(value: float | None) -> str:
    if value is None:
        return ""
    for least, unit, digits in ((9.995e8, 1e9, 1), (9.995e6, 1e6, 0)):
        if value >= least:
            return f"{value / unit:.{digits}f} {'GB' if unit == 1e9 else 'MB'}"
    return f"{value / 1e6:.1f} MB"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would change")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--reproduction", type=Path, default=REPRODUCTION)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--scaling", type=Path, default=SCALING)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench <suite> [--device cpu|cuda] [--quick] [--out DIR] [--peers liger trl ...]

Every suite prints its table and leaves <suite>.json, <suite>.md and, where there is something to see, <suite>.png in
bench/results/<device>/ (or --out; with --quick: runs/bench-quick/).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .report import RESULTS, Report

QUICK = Path("runs/bench-quick")
"""Where results of --quick go: not over those that the README is made of."""

SUITES = {
    "kernels": "time and peak memory of every op beside its peers",
    "traffic": "bytes that each Triton kernel reads and writes, counted in the interpreter; no GPU",
    "compile": "registers, spills, load widths and instructions of the compiled kernels; no GPU",
    "trainer": "where a GRPO and an RSPO update spend their time",
    "demo": "what `make demo` shows, over three seeds",
    "paper": "the paper's tables and figures on the household environment",
    "envspeed": "CPU time of the environments' episodes and steps",
    "environments": "a small model on ALFWorld and WebShop, with GRPO and with RSPO",
}
"""Suites and what they show. The module `bench.<suite>` has:

    run(options) -> Report                  the work; options.keep(report) writes what there is so far
    table(report) -> str                    the report as Markdown, with its caption
    plot(report, path) -> None              optional: the picture
    add_arguments(parser) -> None           optional: options of its own
    compare(report, before) -> list[str]    optional: what got worse since an earlier report, a line each
"""


def suite(name: str) -> Any:
    return import_module(f".{name}", __package__)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    module = suite(options.suite)
    if options.quick and options.out is None:
        options.out = QUICK
    options.keep = lambda so_far: save(module, so_far, options.out, picture=False)
    report: Report = module.run(options)
    print(module.table(report))
    faults = []
    if options.compare is not None:
        faults = module.compare(report, Report.read(options.compare))
        print("\n".join([f"\n{len(faults)} differences from {options.compare}", *faults]))
    else:
        print(f"\nwritten to {save(module, report, options.out)}")
    wrong = faults or report.settings.get("interrupted") or any(row.get("fault") for row in report.rows)
    return 1 if wrong else 0


def save(module: Any, report: Report, out: Path | None, *, picture: bool = True) -> Path:
    """Write a report, its table and (unless it will be written again) its picture; where to."""
    folder = out or RESULTS / report.device
    report.write(folder / f"{report.suite}.json")
    (folder / f"{report.suite}.md").write_text(module.table(report) + "\n", encoding="utf-8")
    if picture and hasattr(module, "plot"):
        try:
            module.plot(report, folder / f"{report.suite}.png")
        except ImportError as error:
            print(f"no picture: {error}")
    return folder


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    suites = parser.add_subparsers(dest="suite", required=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    for name, what in SUITES.items():
        sub = suites.add_parser(name, help=what, description=what)
        # Only the suite that will run is imported: the others may need packages or settings of their own.
        if given[:1] == [name]:
            _add_arguments(sub, suite(name))
    return parser.parse_args(given)


def _add_arguments(parser: argparse.ArgumentParser, module: Any) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few shapes and repetitions, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results/<device>")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="only these providers beside ours; default: all")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    parser.set_defaults(compare=None)
    if hasattr(module, "compare"):
        parser.add_argument("--compare", type=Path, metavar="FILE", help="write nothing; fail where worse than FILE")

"""What a suite found: rows with the machine, versions and date beside them, as JSON, Markdown and picture."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "trl",
    "verl",
    "cut-cross-entropy",
    "flash-attn",
    "numpy",
)


@dataclass
class Report:
    """One run of a suite. `rows` are flat dictionaries, the same keys in each; `settings` say how they were made."""

    suite: str
    device: str
    environment: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, a row a line, so that a changed row is a changed line."""
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in self.rows)
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)  # a long suite writes its report again and again, and may be stopped at any time

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def caption(self) -> str:
        """Machine, versions and date in a line."""
        versions = ", ".join(f"{name} {number}" for name, number in self.environment["versions"].items())
        return f"{self.environment['machine']}; {versions}; {self.environment['date']}"


def environment(device: torch.device | str) -> dict[str, Any]:
    """Machine, package versions and date, for the head of a report."""
    device = torch.device(device)
    return {
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def machine(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Of the packages that matter here, those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def folder_name(device: torch.device) -> str:
    """A device as the name of a folder, e.g. nvidia-h200 or intel-xeon-processor-cpu."""
    if device.type != "cuda":
        name = re.sub(r"@.*|\(\w+\)|, \d+ cores|CPU", "", machine(device)) + " cpu"
    else:
        name = torch.cuda.get_device_name(device)
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table whose columns are aligned in plain text too; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(header), *cells])) for i in range(len(header))]
    numeric = [
        bool(cells) and all(re.match(r"^[-+~<≥]?[\d.,]+\D{0,3}$|^[-–—]?$", row[i]) for row in cells)
        for i in range(len(header))
    ]
    pads = [str.rjust if number else str.ljust for number in numeric]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) + " |"

    rule = (
        "| "
        + " | ".join(
            "-" * (width - 1) + (":" if number else "-") for number, width in zip(numeric, widths, strict=True)
        )
        + " |"
    )
    return "\n".join([line(list(header)), rule, *(line(row) for row in cells)])

"""The demo suite: rows, table and picture of a report; a seed that fails is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import demo
from bench.report import Report

ROWS = [
    {
        "seed": seed, "updates": 54, "start": 0.008, "success": 0.441, "success_low": 0.399, "success_high": 0.485,
        "trajectories": 16128, "tokens": 356502, "minutes": 3.2, "step by evaluation": [0, 27, 54],
        "success by evaluation": [0.008, 0.2, 0.441], "dense_return by evaluation": [0.0, 0.5, 1.0],
        "trajectories by evaluation": [0, 8064, 16128],
    }
    for seed in demo.SEEDS
]  # fmt: skip


def report() -> Report:
    environment = {"machine": "a machine", "versions": {"torch": "2"}, "date": "2026-01-01"}
    return Report("demo", "cpu", environment, {}, ROWS)


def test_table_and_picture(tmp_path: Path) -> None:
    text = demo.table(report())
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[2:]] == ["0", "200", "400"]
    assert lines[2][1:6] == ["0.8%", "44.1%", "39.9% to 48.5%", "54", "16,128"]
    assert "a machine; torch 2; 2026-01-01" in text
    demo.plot(report(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 5_000


def test_a_seed_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="demo with seed 200 failed"):
        demo.row(200, tmp_path, [])

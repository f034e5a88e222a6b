"""The suite `bench compile`: its tables and what it compares. What compiles is in test_compile_check.py."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bench import compile as suite
from bench.compile import peers
from bench.report import Report
from rspo_kernels import compile_check
from rspo_kernels.compile_check import Result

OURS = Result("logprobs_forward_kernel", "bf16", "sm_90", 59, 0, 32, 128, 32, passes=(8.0,), special=1.25, other=6.75)
LOSS = replace(OURS, kernel="loss_rows_kernel", variant="bf16 RSPO", passes=(8.0, 7.0))
FORWARD = Result("_grpo_loss_fwd_kernel", "loss, forward", "sm_90", 80, 0, 0, 128, 32, passes=(11.0,), other=11.0)
BACKWARD = replace(FORWARD, kernel="_grpo_loss_bwd_kernel", variant="loss, backward", passes=(18.5,), spills=8)


def compiled(monkeypatch, results, theirs=(), **options):
    """A run of the suite in which the compilers give these results."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(compile_check, "check", lambda targets, given=None: list(results if given is None else theirs))
    defaults = {"target": ["sm_90"], "quick": False, "peers": ["liger"]}
    return suite.run(argparse.Namespace(**defaults | options))


def test_the_same_work_stands_beside_each_other(monkeypatch, tmp_path):
    report = compiled(monkeypatch, [OURS, LOSS], [FORWARD, BACKWARD])
    assert [row["provider"] for row in report.rows] == ["rspo_kernels"] * 2 + ["liger-kernel"] * 2
    assert {tuple(row) for row in report.rows} == {tuple(report.rows[0])}, "the same keys in each row"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in suite.table(report).split("\n")]
    (together,) = [line for line in cells if line[:2] == ["loss and gradient", "liger-kernel"]]
    assert together[2:6] == ["80, 80", "0, 8", "128, 128", "11.0 + 18.5"]
    assert together[-1] == "29.5"
    (absent,) = [line for line in cells if line[:2] == ["gradient of log-prob", "trl"]]
    assert absent[2] == "missing"
    report.write(tmp_path / "compile.json")
    assert suite.compare(report, Report.read(tmp_path / "compile.json")) == []
    suite.plot(report, tmp_path / "compile.png")
    assert (tmp_path / "compile.png").stat().st_size > 1000


def test_a_spill_is_a_fault_in_our_kernels_only(monkeypatch):
    report = compiled(monkeypatch, [replace(OURS, spills=4)], [BACKWARD])
    assert [row["fault"] is not None for row in report.rows] == [True, False]


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(suite.PEERS, "liger", peers.Peer("liger-kernel", "no_such_package", peers.liger))
    report = compiled(monkeypatch, [OURS], [FORWARD])
    assert report.settings["missing"] == ["liger-kernel"]
    assert [row["provider"] for row in report.rows] == ["rspo_kernels"]
    assert "Not installed, so not compiled: liger-kernel." in suite.table(report)


def test_what_is_worse_fails_and_another_triton_only_shows_it(monkeypatch, capsys):
    before = compiled(monkeypatch, [OURS, replace(OURS, target="sm_80")], [FORWARD])
    now = compiled(monkeypatch, [replace(OURS, passes=(9.0,))], [replace(FORWARD, passes=(99.0,))])
    (found,) = suite.compare(now, before)
    assert "pass 1 has 9.0 instructions an element, 8.0 in the table" in found
    before.environment["versions"] = before.environment["versions"] | {"triton": "99.0"}
    assert suite.compare(now, before) == []
    assert found in capsys.readouterr().out


def test_a_quick_run_compiles_one_target_and_no_peers(monkeypatch):
    report = compiled(monkeypatch, [OURS], [FORWARD], quick=True, target=list(compile_check.TARGETS))
    assert report.settings == {"targets": ["sm_90"], "peers": [], "missing": []}
    assert len(report.rows) == 1


def test_a_file_is_loaded_without_its_package(tmp_path, monkeypatch):
    folder = tmp_path / "heavy_package" / "ops"
    folder.mkdir(parents=True)
    (tmp_path / "heavy_package" / "__init__.py").write_text("raise ImportError('heavy')")
    (folder / "light.py").write_text("import heavy_package.device as d\nfound = d.name")
    monkeypatch.syspath_prepend(str(tmp_path))
    device = ModuleType("heavy_package.device")
    device.name = "stand-in"
    package = ModuleType("heavy_package")
    package.device = device
    stand_ins = {"heavy_package": package, "heavy_package.device": device}
    assert peers.load("heavy_package", "ops/light.py", **stand_ins).found == "stand-in"
    assert not stand_ins.keys() & sys.modules.keys()
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        peers.load("no_such_package", "x.py")


def test_importing_the_suite_does_not_import_triton():
    """Other suites need Triton's interpreter, which is chosen before the import."""
    code = "import sys, bench.compile; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0

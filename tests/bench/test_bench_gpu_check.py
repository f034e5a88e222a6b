"""gpu-check on a machine without a GPU: its error, its stages, their limits and logs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import Stage
from bench.kernels.cases import BUDGET

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_a_cuda_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "x")]) == 2
    message = capsys.readouterr().err
    assert "needs a CUDA device" in message
    assert sys.executable in message
    assert not (tmp_path / "x").exists()


def test_stages_run_in_order_within_their_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = gpu_check._parse(["--kernels-seconds", "60", "tests/kernels/test_segments.py"])
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    tests, kernels, trainer = gpu_check.stages(options, tmp_path, with_tests=True)
    assert [tests.name, kernels.name, trainer.name] == ["tests", "kernels", "trainer"]
    assert tests.command[-1] == "tests/kernels/test_segments.py"
    assert "-n" not in tests.command, "without xdist"
    assert kernels.limit == 60
    in_all = gpu_check._parse([]).kernels_seconds + gpu_check.GRACE
    assert BUDGET["cuda", False] < gpu_check._parse([]).kernels_seconds < in_all <= 480
    assert kernels.command[1:] == ("-m", "bench", "kernels", "--device", "cuda", "--out", str(tmp_path))
    assert [s.name for s in gpu_check.stages(options, tmp_path, with_tests=False)] == ["kernels", "trainer"]
    options = gpu_check._parse(["--tests-seconds", "0", "--kernels-seconds", "0"])
    assert [s.name for s in gpu_check.stages(options, tmp_path, with_tests=True)] == ["trainer"]
    assert gpu_check.missing_packages() == ["pytest", "hypothesis"]


def python(code: str, limit: float = 60.0, log: str | None = "log.txt") -> Stage:
    return Stage("stage", (sys.executable, "-c", code), limit, log)


def test_outcomes(tmp_path: Path) -> None:
    assert gpu_check.run(python("print('hello')"), tmp_path).startswith("passed after")
    assert (tmp_path / "log.txt").read_text() == "hello\n"
    assert gpu_check.run(python("raise SystemExit(3)"), tmp_path).startswith("failed (exit status 3)")


def test_a_stage_sees_the_repository_and_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code = "import os, bench; print(bench.__file__, os.environ.get('TRITON_INTERPRET'))"
    gpu_check.run(python(code), tmp_path)
    assert (tmp_path / "log.txt").read_text() == f"{ROOT / 'bench' / '__init__.py'} None\n"


def test_a_late_stage_is_asked_to_stop_then_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polite = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('so far')"
    began = time.perf_counter()
    assert gpu_check.run(python(polite, limit=5.0), tmp_path).startswith("stopped at its time limit")
    assert time.perf_counter() - began < 60, "as long as it would have slept"
    assert (tmp_path / "log.txt").read_text() == "so far\n"

    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    assert gpu_check.run(python(deaf, limit=5.0), tmp_path).startswith("stopped at its time limit")
    child = int((tmp_path / "log.txt").read_text())
    for _ in range(600):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, 9)
    raise AssertionError("a child of the stage lives on")


def test_long_logs_keep_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TAIL", 100)
    gpu_check.run(python("print('x' * 1000 + 'the end')"), tmp_path)
    assert (tmp_path / "log.txt").read_text().endswith("the end\n")
    assert (tmp_path / "log.txt").stat().st_size == 100


def test_a_failing_stage_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole check with a device that is pretended and stages of our own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "machine", lambda device: "a GPU")
    facts = {"machine": "a GPU", "date": "today", "python": "3", "versions": {"torch": "2"}}
    monkeypatch.setattr(gpu_check, "environment", lambda device: facts)
    monkeypatch.setattr(gpu_check, "missing_packages", lambda: ["hypothesis"])
    stages = [python("raise SystemExit(1)", log=None), Stage("second", (sys.executable, "-c", ""), 60.0)]
    monkeypatch.setattr(gpu_check, "stages", lambda options, folder, with_tests: stages)
    (tmp_path / "stage.json").write_text("of an earlier run")
    (tmp_path / "trainer.json").write_text("of an earlier run, of a stage that is left out now")
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    written = (tmp_path / "gpu_check.txt").read_text()
    for line in (
        "machine  a GPU",
        "tests    not run: needs hypothesis",
        "stage    failed (exit status 1)",
        "second   passed",
    ):
        assert line in written
    assert "pip install hypothesis" in capsys.readouterr().out
    assert not (tmp_path / "stage.json").exists()
    assert (tmp_path / "trainer.json").exists()

    monkeypatch.setattr(gpu_check, "missing_packages", lambda: [])
    del stages[0]
    assert gpu_check.main(["--out", str(tmp_path)]) == 0


def test_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--trainer-seconds" in run.stdout

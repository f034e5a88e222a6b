"""Mistakes in a command line are answered before torch and transformers are imported, and said as what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rspo.cli import main

SCRIPT = """
import sys
from rspo.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code or 0
print("imported:", *(name for name in ("torch", "transformers") if name in sys.modules))
sys.exit(status)
"""


def light(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
    """A command's exit status and what it says, in a process of its own; it has not imported torch."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    said = done.stdout + done.stderr
    assert "imported:\n" in said, said
    return done.returncode, said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--nonsense", "the following arguments are required"),
        ("nonsense", "invalid choice: 'nonsense'"),
        ("train --nonsense", "unrecognized arguments: --nonsense"),
        ("train swap.alpha=0.5", "a setting is given as --set swap.alpha=0.5"),
        ("train --steps", "expected one argument"),
        ("train --steps x", "invalid int value: 'x'"),
        ("train --set swap.alhpa=0.5", "did you mean 'alpha'"),
        ("train --set swap.alpha=2", "swap.alpha"),
        ("train --set policy.dtype=float7", "policy.dtype"),
        ("train --config missing.yaml", "missing.yaml does not exist"),
        ("train --resume", "--resume needs --out"),
        ("train --resume --out nowhere", "nowhere holds no run"),
        ("train --out file", "file must be a folder, and is a file"),
        ("train --out file/run", "file is a file"),
        ("train --env nowhere --out new", "env.name='nowhere' with env.options={}: unknown environment 'nowhere'"),
        ("train --env no.where:Env --out new", "No module named 'no'"),
        ("train --policy nowhere --out new", "policy.path='nowhere' is not a folder"),
        ("train --dense-reward model:nowhere --out new", "'nowhere' must be a reward model"),
        ("collect --expert 1 --env nowhere --out new", "unknown environment 'nowhere'"),
        ("collect --policy nowhere --out new", "policy.path='nowhere' is not a folder"),
        ("reward-model nowhere", "nowhere does not exist; expected trajectories"),
        ("play --env nowhere", "unknown environment 'nowhere'"),
        ("eval nowhere", "nowhere is not a folder"),
        ("eval . --set evaluation.epsiodes=3", "did you mean 'episodes'"),
        ("export . --out file", "file exists"),
        ("collect --expert 2 --out new", "must be a probability"),
        ("collect --expert 1 --out file", "file must be a folder, and is a file"),
        ("reward-model data --out file", "file must be a folder, and is a file"),
        ("play --set env.nmae=x", "did you mean 'name'"),
        ("settings nonsense", "neither a setting nor a section"),
    ],
)
def test_a_mistake_is_answered_without_torch(tmp_path: Path, arguments: str, says: str) -> None:
    (tmp_path / "file").touch()
    status, said = light(*arguments.split(), folder=tmp_path)
    assert status == 2
    assert says in said


@pytest.mark.parametrize("arguments", ["--help", "train --help", "eval --help", "collect --help", "settings swap"])
def test_help_needs_no_torch(arguments: str) -> None:
    assert light(*arguments.split())[0] == 0


def test_a_configuration_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        f"exec {sys.executable} -m rspo train --dry-run --config <(echo 'preset: paper'; echo 'run: {{steps: 0}}')"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "run.steps must be" in done.stderr
    (tmp_path / "empty.yaml").touch()
    assert main(["train", "--config", str(tmp_path / "empty.yaml")]) == 2
    assert "expected a mapping of sections, got nothing" in capsys.readouterr().err

"""Two writers in one folder, and what a writer that was killed leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rspo_toys import small_config

from rspo.cli import main
from rspo.config import ConfigError
from rspo.config.lock import LOCK_FILE, FolderInUseError, FolderLock, check_unused, one_writer
from rspo.runs.checkpoint import list_checkpoints
from rspo.start import latest_checkpoint, open_run

HOLD = "import sys, pathlib; from rspo.config.lock import FolderLock; lock = FolderLock(pathlib.Path(sys.argv[1]));"
WAIT = "print('held', flush=True); sys.stdin.read()"
RUN = ("run.steps=4", "run.save_every=2")


def holder(folder: Path, then: str = WAIT) -> subprocess.Popen[str]:
    """Another process that holds the folder's lock until it is ended."""
    command = [sys.executable, "-c", HOLD + then, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_locked_folder_names_its_owner_and_a_killed_owner_is_no_obstacle(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(FolderInUseError, match=rf"{tmp_path} is being written by process {process.pid} on "):
        FolderLock(tmp_path)
    with pytest.raises(FolderInUseError):
        check_unused(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    check_unused(tmp_path)
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / LOCK_FILE).read_text()
    assert not list(tmp_path.iterdir())


def test_a_child_of_a_killed_owner_does_not_hold_its_lock(tmp_path: Path) -> None:
    # The owner says that it holds the lock when the child has come to itself.
    child = "(os.write(w, b'.'), os.close(1), time.sleep(60))"
    process = holder(tmp_path, f"import os, time; r, w = os.pipe(); os.fork() or {child}; os.read(r, 1); {WAIT}")
    process.kill()
    process.wait()
    FolderLock(tmp_path).close()


def test_a_process_locks_a_folder_once_and_parts_of_it_share_the_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(FolderInUseError):
            FolderLock(tmp_path)
        with one_writer(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).exists()
    with one_writer(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_trainer_is_refused_and_touches_nothing(start: Path, tmp_path: Path, resume: bool) -> None:
    config = small_config(*RUN, f"policy.path={start}")
    if resume:
        open_run(config, tmp_path, progress=False).close()
    partial = tmp_path / "checkpoints" / ".step-000006.partial"
    partial.mkdir(parents=True)
    process = holder(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {process.pid} "):
        open_run(config, tmp_path, resume=resume, progress=False)
    assert partial.is_dir()
    process.kill()
    process.wait()
    trainer = open_run(config, tmp_path, resume=resume, progress=False)
    with pytest.raises(FolderInUseError):
        open_run(config, tmp_path, resume=True, progress=False)
    trainer.close()
    assert not partial.exists()
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("arguments", ["train", "train --resume", "train --dry-run", "collect --expert 1"])
def test_commands_say_that_a_folder_is_in_use(
    tmp_path: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--resume" in arguments:
        (tmp_path / "config.yaml").write_text("run: {steps: 150}\n")
    process = holder(tmp_path)
    status = main([*arguments.split(), "--out", str(tmp_path)])
    process.kill()
    process.wait()
    said = capsys.readouterr()
    assert status != 0
    assert f"{tmp_path} is being written by process {process.pid} on" in said.err + said.out


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def without_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def cut_off(checkpoint: Path) -> None:
    os.truncate(checkpoint / "optimizer.pt", 100)


@pytest.mark.parametrize("damage", [empty, without_state, without_weights, cut_off])
def test_an_incomplete_checkpoint_is_passed_over(start: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    config = small_config(*RUN, f"policy.path={start}")
    trainer = open_run(config, tmp_path, progress=False)
    trainer.train()
    trainer.close()
    whole, damaged = list_checkpoints(tmp_path / "checkpoints")
    damage(damaged)
    with pytest.warns(UserWarning, match=f"{damaged} is incomplete and is passed over"):
        assert latest_checkpoint(tmp_path) == whole
    with pytest.raises(ConfigError, match=f"{damaged} is not a checkpoint of the run"):
        open_run(config, tmp_path, resume=damaged, progress=False)
    assert damaged.is_dir()
    with pytest.warns(UserWarning, match="can be deleted"):
        trainer = open_run(config, tmp_path, resume=True, progress=False)
    assert trainer.books.step == 2
    trainer.train()
    trainer.close()
    assert list_checkpoints(tmp_path / "checkpoints") == [whole, damaged]


def test_a_file_in_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for out, said in (("file", "file must be a folder, and is a file"), ("file/run", "file is a file")):
        assert main(["train", "--out", str(tmp_path / out)]) == 2
        assert said in capsys.readouterr().err

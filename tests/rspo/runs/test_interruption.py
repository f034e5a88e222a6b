"""Runs that stop: killed at any moment, by a signal, by a full disk, by numbers that are not finite; and go on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import HELPERS
from rspo_toys import ParityEnv, small_config

from rspo.algorithm.rewards import NonFiniteError
from rspo.cli import main
from rspo.config import Config, ConfigError
from rspo.config.storage import StorageError, new_folder, remove_folder, tidy, write_text
from rspo.models.agent import Agent
from rspo.models.policy import Policy
from rspo.runs.checkpoint import list_checkpoints, load_checkpoint, prune_checkpoints, save_checkpoint
from rspo.runs.records import Tracker, read_metrics, without_timings
from rspo.start import open_run
from rspo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

PARITY = [
    "env.name=rspo_toys:ParityEnv",
    "evaluation.every=2",
    "evaluation.temperatures=1.0",
    "evaluation.transcripts=0",
    "run.steps=4",
    "run.save_every=2",
    "swap.alpha_schedule=linear",
    "optimizer.schedule=cosine",
    "optimizer.warmup_updates=1",
]
METHODS = {
    "grpo": [],
    "ppo": ["base=ppo"],
    "history": ["swap.source=history"],
    "lora": ["base=ppo", "lora.rank=2", "loss.kl_coef=0.01"],
}


class Forks:
    """Jobs for `rspo_killed_runs`."""

    def __init__(self, output: Path, start: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        program = HELPERS / "rspo_killed_runs.py"
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.output = output
        self.start = start

    def do(self, job: dict[str, Any], code: int) -> list[str]:
        """The moments of a job that ends with an exit code (negative: by a signal)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**job, "output": str(self.output)}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert answer["code"] == code, self.output.read_text()
        return list(answer["moments"])

    def train(self, folder: Path, name: str, resume: bool = False, at: int | None = None) -> list[str]:
        config = [*PARITY, f"policy.path={self.start}", *METHODS[name]]
        job = {"do": "train", "folder": str(folder), "config": config, "method": "rspo", "resume": resume, "at": at}
        return self.do(job, 0 if at is None else -signal.SIGKILL)

    def rspo(self, folder: Path, code: int, *flags: str, **settings: Any) -> tuple[str, list[str]]:
        """What the command `rspo train` says, and its moments."""
        sets = [*PARITY, *[f"rollout.{size}=2" for size in ("tasks", "group_size")], "swap.k=2", "swap.buffer_tasks=1"]
        sets = [part for setting in [*sets, "swap.alpha=0.5"] for part in ("--set", setting)]
        command = ["train", "--out", str(folder), "--quiet", "--policy", str(self.start), *sets, *flags]
        moments = self.do({"do": "rspo", "folder": str(folder), "arguments": command, **settings}, code)
        return self.output.read_text(), moments


@pytest.fixture(scope="module")
def forks(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks") / "output", start)
    yield forks
    assert forks.process.stdin is not None
    forks.process.stdin.close()
    forks.process.wait(timeout=600)


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """Runs that nothing interrupts, and their moments; each is made once."""
    made: dict[str, tuple[Path, list[str]]] = {}

    def get(name: str) -> tuple[Path, list[str]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("whole") / name
            made[name] = folder, forks.train(folder, name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def whole_command(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The run of `Forks.rspo`, uninterrupted, and its moments."""
    folder = tmp_path_factory.mktemp("command") / "whole"
    return folder, forks.rspo(folder, 0)[1]


def content(folder: Path) -> dict[str, str]:
    """The files below a folder, by their digests; of the state of a run all but the time spent on it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b"folder"
        if path.name == "state.json":
            data = json.dumps({**json.loads(data), "seconds": None}).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def assert_same_run(folder: Path, other: Path) -> None:
    """The same records but for timings, and the same last checkpoint: weights, optimisers, critic, random states."""
    assert without_timings(read_metrics(folder)) == without_timings(read_metrics(other))
    last, expected = (list_checkpoints(run / "checkpoints")[-1] for run in (folder, other))
    assert last.name == expected.name
    assert content(last) == content(expected)
    assert not list(folder.rglob("*.partial"))
    assert not list(folder.rglob("*.previous"))


# Killed


@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_goes_on_to_the_same_result(
    name: str, forks: Forks, whole: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    """In the middle of B's and A's part of a loop, between the last record and its checkpoint, inside the checkpoint,
    right before and after it has its name; and at random moments, twice in one run."""
    expected, moments = whole(name)
    first, second = (moments.index(f"os.rename checkpoints/.step-00000{step}.partial") for step in (2, 4))
    loop = [i for i in range(first, second) if moments[i] == "optimizer step"]
    weights = {"ppo": "critic.safetensors", "lora": "adapter_model.safetensors"}.get(name)
    if weights is not None:
        chosen = [loop[-2], moments.index(f"fsync checkpoints/.step-000004.partial/{weights}", first)]
    else:
        chosen = {"grpo": [loop[1], second - 4, second], "history": [second - 4]}[name]
    rng = np.random.default_rng(len(name))
    begun = moments.index("open metrics.jsonl")
    for case, at in enumerate([*chosen, int(rng.integers(begun, first)), int(rng.integers(first, len(moments)))]):
        folder = tmp_path / str(case)
        forks.train(folder, name, at=at)
        if case == 0:  # and again: five moments after it has taken up work, or at the first that it has
            forks.train(folder, name, resume=True, at=moments.index("open metrics.jsonl") + 5)
        forks.train(folder, name, resume=True)
        assert_same_run(folder, expected)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_kill_at_any_write_of_a_checkpoint_leaves_complete_ones(
    replaces: bool, forks: Forks, whole: Callable[[str], tuple[Path, list[str]]], tmp_path: Path
) -> None:
    source = whole("grpo")[0] / "checkpoints"
    old, new = source / "step-000002", source / "step-000004"
    folder, target = tmp_path / "checkpoints", "step-000002" if replaces else "step-000004"
    job = {"do": "save", "folder": str(folder), "target": target, "source": str(new)}

    def save(at: int | None) -> tuple[list[str], dict[str, dict[str, str]]]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, folder / old.name)
        moments = forks.do({**job, "at": at}, 0 if at is None else -signal.SIGKILL)
        tidy(folder)
        return moments, {path.name: content(path) for path in folder.iterdir()}

    before = {old.name: content(old)}
    moments, after = save(None)
    assert after.keys() == before.keys() | {target}
    assert after[target]["model.safetensors"] == content(new)["model.safetensors"]
    assert len(moments) >= 20
    renamed = moments.index(f"os.rename .{target}.partial")
    for at in range(len(moments)):
        assert save(at)[1] == (after if at > renamed else before), moments[at]


def test_only_whole_checkpoints_are_left_when_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "state.json").write_text("{}")
    (tmp_path / "failed").mkdir()
    prune_checkpoints(tmp_path, 3)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3", "4", "5"]

    def killed(*arguments: object) -> None:
        raise SystemExit

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        prune_checkpoints(tmp_path, 2)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["4", "5"]
    monkeypatch.undo()
    tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "step-000004", "step-000005"]


def test_records_are_cut_in_place_and_never_short_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "update", "step": step}) + "\n" for step in range(4)]
    for written, records, left in (
        ("".join(lines), 2, 2),
        ("".join(lines[:3]) + lines[3][:9], 4, 3),
        ("".join(lines), 0, 0),
        ("", 2, 0),
        ('{"\xff\n' + lines[1], 1, 1),
    ):
        path.write_bytes(written.encode("latin1"))
        tracker = Tracker(tmp_path, 4, records=records, progress=False)
        assert tracker.records == left
        tracker.close()
        assert path.read_bytes() == b"".join(written.encode("latin1").splitlines(keepends=True)[:left])


# Stopped by a signal


@pytest.mark.parametrize(("number", "code", "said"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM")])
def test_signals_stop_a_run_cleanly(
    number: int, code: int, said: str, forks: Forks, whole_command: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    expected, moments = whole_command
    first = moments.index("os.rename checkpoints/.step-000002.partial")
    advice = f"rspo train --resume --out {folder}\n"

    error, _ = forks.rspo(folder, code, at=first - 4, number=number)
    assert error.endswith(
        f"stopped by {said}; the run can go on from its start, as there is no checkpoint yet: {advice}"
    )
    assert list((folder / "checkpoints").iterdir()) == [], "what had been written of the checkpoint is gone"
    assert "Traceback" not in error
    error, _ = forks.rspo(folder, code, "--resume", at=first + 12, number=number)
    assert error.endswith(f"stopped by {said}; the run can go on from checkpoint step-000002: {advice}")
    forks.rspo(folder, 0, "--resume")
    assert_same_run(folder, expected)


# Disks


def test_a_full_disk_is_an_error_that_loses_nothing(forks: Forks, tmp_path: Path) -> None:
    """Really full: the system refuses to let a file grow beyond 100 kB, which the weights need."""
    folder = tmp_path / "run"
    error, _ = forks.rspo(folder, 2, file_limit=100_000)
    assert f"rspo: error: {folder}/checkpoints/step-000002 could not be written: " in error
    assert "File too large" in error
    assert "; once it can be, the run can go on from its start" in error
    assert "Traceback" not in error
    assert list((folder / "checkpoints").iterdir()) == []
    forks.rspo(folder, 0, "--resume", "--set", "run.steps=2")
    before = content(folder / "checkpoints")
    error, _ = forks.rspo(folder, 2, "--resume", file_limit=100_000)
    assert "step-000004 could not be written: " in error
    assert "the run can go on from checkpoint step-000002: rspo train --resume" in error
    assert content(folder / "checkpoints") == before


class Faulty:
    """Raises an error at the n-th call of any of some functions of `os` and `shutil`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int) -> None:
        self.calls, self.at, self.error = 0, at, error
        for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "write")):
            monkeypatch.setattr(module, name, self.counted(getattr(module, name)))

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise self.error
            return function(*arguments, **settings)

        return call


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("replaces", [False, True])
def test_an_error_at_any_write_leaves_what_was_there(
    error: BaseException, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file.yaml"

    def write(text: str) -> None:
        with new_folder(folder) as partial:
            (partial / "deep").mkdir()
            for path in (partial / "a", partial / "deep" / "b"):
                path.write_text(text)
        write_text(file, text)

    at, done, said = 1, False, ""
    while not done:
        shutil.rmtree(folder, ignore_errors=True)
        file.unlink(missing_ok=True)
        if replaces:
            write("old")
        before = content(tmp_path)
        with monkeypatch.context() as patch:
            faulty = Faulty(patch, error, at)
            try:
                write("new")
                done = True
            except (StorageError, KeyboardInterrupt) as raised:
                said = str(raised)
        if isinstance(error, OSError) and not done:
            assert said in [f"{path} could not be written: {error.strerror}" for path in (folder, file)]
        tidy(tmp_path)
        after = content(tmp_path)
        whole = {name: hashlib.sha256(b"new").hexdigest() for name in ("folder/a", "folder/deep/b", "file.yaml")}
        for names in (("folder/a", "folder/deep/b"), ("file.yaml",)):
            states = [{name: c.get(name) for name in names} for c in (after, before, whole)]
            assert states[0] in states[1:], (at, "neither old nor new")
        assert not list(tmp_path.glob(".*"))
        at += 1
    assert faulty.calls > 10


def test_torch_and_safetensors_errors_name_the_reason(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    agent = Agent(Policy.load(start, config.policy), config)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(*arguments: object) -> None:
        try:
            raise full
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos") from None

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(StorageError, match=r"step-000001 could not be written: No space left on device"):
        save_checkpoint(tmp_path / "step-000001", agent, {})
    assert list(tmp_path.iterdir()) == []


def test_records_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, 1, progress=False)
    tracker.record("update", 1, {"success": 0.5})
    tracker.file.close()
    tracker.file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - as the tracker's own
    with pytest.raises(StorageError, match=r"metrics\.jsonl could not be written: No space left on device"):
        tracker.record("update", 2, {"success": 0.5})
    with pytest.raises(StorageError, match=r"metrics\.jsonl could not be written"):
        tracker.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_an_unwritable_folder_is_a_clear_error(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    sets = [part for flag in [*PARITY, "rollout.tasks=2", "evaluation.episodes=2"] for part in ("--set", flag)]
    for folder, reason in (
        (tmp_path / "file", f"{tmp_path / 'file'} must be a folder, and is a file"),
        (tmp_path / "file" / "run", f"cannot be one, because {tmp_path / 'file'} is a file"),
        (Path("/proc/run"), "/proc/run could not be written: "),
        (tmp_path / "run", f"{tmp_path / 'run' / 'checkpoints'}"),
    ):
        command = ["train", "--policy", str(start), "--method", "grpo", "--out", str(folder), "--quiet", *sets]
        assert main([*command, "--steps", "1"]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert "Traceback" not in error


# Numbers that are not finite, and checkpoints that do not fit


def ppo_trainer(start: Path, folder: Path) -> Trainer:
    config = small_config(*PARITY, f"policy.path={start}", method="ppo")
    return open_run(config, folder, progress=False)


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ("critic.head.weight", r"turn \d of trajectory \d of group \d .* has .*value nan"),
        ("critic.body.layers.1.mlp.up_proj.weight", "gradient of parameter 'critic.body.layers.1.mlp.up_proj.weight'"),
        ("model.layers.1.mlp.up_proj.weight", "gradient of parameter 'model.layers.1.mlp.up_proj.weight' is not"),
    ],
)
def test_what_is_not_finite_stops_the_run_and_is_named(parameter: str, said: str, start: Path, tmp_path: Path) -> None:
    """Values of the critic; gradients of the critic, and of the policy. The parameter is not the first of its model."""
    trainer = ppo_trainer(start, tmp_path)
    found = dict(trainer.agent.named_parameters())[parameter]
    if "head" in parameter:
        with torch.no_grad():
            found.fill_(torch.nan)
    else:
        found.register_hook(
            lambda gradient: gradient.flatten().index_fill(0, torch.tensor([3]), torch.nan).view_as(gradient)
        )
    with pytest.raises(NonFiniteError, match=said):
        trainer.train()
    trainer.close()
    failed = tmp_path / "checkpoints" / "failed"
    assert {"model.safetensors", "critic.safetensors", "optimizer.pt", "state.json"} <= set(os.listdir(failed))
    assert list_checkpoints(tmp_path / "checkpoints") == [], "a resumed run does not go on from it"
    assert read_metrics(tmp_path, "update") == []


def test_a_failure_on_a_full_disk_says_both(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rspo.algorithm.rewards.outcome_reward", lambda trajectory: [np.inf] * len(trajectory))
    config = small_config(*PARITY, method="grpo")
    agent = Agent(Policy.load(start, config.policy), config)
    trainer = Trainer(config, tmp_path, ParityEnv(), agent, None, Tracker(tmp_path, 4, progress=False))
    (tmp_path / "checkpoints").touch()
    with pytest.raises(NonFiniteError, match=r"reward inf at turn .*; in addition, .*failed could not be written: "):
        trainer.train()
    trainer.close()


def test_checkpoints_of_another_method_or_critic_are_refused(start: Path, tmp_path: Path) -> None:
    def agent_of(config: Config, has_critic: bool) -> Agent:
        return Agent(Policy.load(start, config.policy), config, has_critic)

    grpo, ppo = small_config(method="grpo"), small_config(method="ppo")
    shared = small_config("critic.backbone=shared", method="ppo")
    save_checkpoint(tmp_path / "step-000001", agent_of(grpo, False), {})
    with pytest.raises(ConfigError, match=r"step-000001 was made with method 'grpo', this run has 'ppo'"):
        load_checkpoint(tmp_path / "step-000001", ppo, has_critic=True)
    with pytest.raises(ConfigError, match=r"made with method 'grpo', this run has 'rspo'"):
        load_checkpoint(tmp_path / "step-000001", small_config(), has_critic=False)
    save_checkpoint(tmp_path / "step-000002", agent_of(ppo, False), {})
    with pytest.raises(ConfigError, match=r"step-000002 has no critic, but 'ppo' needs one"):
        load_checkpoint(tmp_path / "step-000002", ppo, has_critic=True)
    save_checkpoint(tmp_path / "step-000003", agent_of(ppo, True), {})
    with pytest.raises(
        ConfigError, match=r"not one with critic\.backbone='shared': body\..* is \[.*\], expected missing"
    ):
        load_checkpoint(tmp_path / "step-000003", shared, has_critic=True)
    load_checkpoint(tmp_path / "step-000003", ppo, has_critic=True)


def test_a_folder_leaves_its_name_before_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    seen: list[list[str]] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path: seen.append(os.listdir(tmp_path)))
    remove_folder(tmp_path / "a")
    assert seen == [[".a.partial"]]

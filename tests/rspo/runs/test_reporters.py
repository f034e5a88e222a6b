"""Weights & Biases and Trackio: the real packages, on this machine alone, in runs that are broken off and go on.

A server stands where every request to the outside would go, and counts what comes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS, ROOT
from rspo_toys import small_config

from rspo.config import ConfigError
from rspo.config.files import apply_flags
from rspo.runs.records import read_metrics
from rspo.start import open_run

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
"""Of wandb's files: a log as LevelDB's, behind a header of its own."""


@contextmanager
def outside() -> Iterator[tuple[dict[str, str], list[bytes]]]:
    """Environment variables that lead requests for the outside to a server here, and what has come to it so far."""
    server = socket.create_server(("127.0.0.1", 0))
    came: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    came.append(connection.recv(4096).split(b"\r\n")[0])
                except OSError:
                    came.append(b"nothing")

    threading.Thread(target=serve, daemon=True).start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    places = ("HF_ENDPOINT", "WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    accounts = {"HF_TOKEN": "hf_" + 34 * "x", "WANDB_API_KEY": 40 * "x"}
    try:
        yield {**dict.fromkeys(places, address), **accounts}, came
    finally:
        server.close()


def reported(folder: Path, start: Path, *flags: str) -> tuple[dict[str, list[dict[str, Any]]], list[bytes]]:
    """Make a run in a process of its own: what Trackio has of it, by run, and requests to the outside."""
    pytest.importorskip("wandb", reason="wandb is an extra")
    pytest.importorskip("trackio", reason="trackio is an extra")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_", "HF_"))}
    homes = {name: str(folder.parent / name) for name in ("HOME", "TRACKIO_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    with outside() as (places, came):
        ended = subprocess.run(
            [sys.executable, str(HELPERS / "rspo_reported_run.py"), str(folder), str(start), *flags],
            env={**kept, **homes, **places, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HELPERS)])},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert ended.returncode == 0, ended.stderr
    (trackio,) = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    return trackio, came


@pytest.fixture(scope="module")
def run(
    start: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, Any]]], list[bytes]]:
    folder = tmp_path_factory.mktemp("reported") / "mine"
    return folder, *reported(folder, start, "run.report_to=[wandb, trackio]")


def rows_of(file: Path) -> tuple[list[dict[str, Any]], Any]:
    """The rows of a wandb file, each with its step, and the run that it describes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), FILE_HEADER, b""
    rows, about = [], None
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind not in (1, 4):  # the first or a middle part of a record
            continue
        record, parts = Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "run":
            about = about or record.run
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({"row": record.history.step.num, **items})
    return rows, about


def places_of(records: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int, dict[str, float]]]:
    """Each record with its step, which for agent B is B's, and its finite numbers under their full names."""
    updates_of_b = 0
    for record in records:
        updates_of_b += record["kind"] == "dense"
        names = [name for name, value in record.items() if name not in ("kind", "step") and value is not None]
        step = updates_of_b if record["kind"] == "dense" else record["step"]
        yield record, step, {f"{record['kind']}/{name}": record[name] for name in names}


def test_wandb_has_every_record_once_also_after_a_resume(run: Any) -> None:
    folder, _, _ = run
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (file,) = offline.glob("run-*.wandb")
    rows, about = rows_of(file)
    records = read_metrics(folder)
    assert [record["kind"] for record in records].count("dense") == 4
    for number, (row, (record, step, values)) in enumerate(zip(rows, places_of(records), strict=True)):
        shown = {name: value for name, value in row.items() if not name.startswith("_") and name != "row"}
        assert shown == {**values, f"{record['kind']}/step": step}
        assert row["row"] == number
    assert about.project == "rspo"
    assert about.display_name == "mine"
    assert about.run_id == (folder / "wandb.id").read_text()
    settings = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert settings["swap.alpha"] == 0.25


def test_trackio_has_every_record_once_also_after_a_resume(run: Any) -> None:
    folder, runs, _ = run
    assert list(runs) == [(folder / "trackio.id").read_text()], "the run's former self is gone"
    (rows,) = runs.values()
    found = [(row["step"], {name: v for name, v in row.items() if "/" in name}) for row in rows]
    expected = [(step, values) for _, step, values in places_of(read_metrics(folder))]
    key = lambda item: (item[0], sorted(item[1]))  # noqa: E731 - rows of one moment come in any order
    assert sorted(found, key=key) == sorted(expected, key=key)


def test_nothing_leaves_the_machine_unless_asked(run: Any, start: Path, tmp_path: Path) -> None:
    assert run[2] == []
    asked = reported(tmp_path / "run", start, "run.report_to=trackio", "run.report_online=true")[1]
    assert any(b"whoami" in request for request in asked), "the server would have noticed"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_is_an_error_before_anything_is_played(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    config = small_config(f"policy.path={start}", f"run.report_to={name}")
    with pytest.raises(ConfigError, match=rf"run.report_to='{name}' needs a package: pip install 'rspo\[{name}\]'"):
        open_run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_mode_that_wandb_does_not_know_is_named(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "onlin")
    config = small_config(f"policy.path={start}", "run.report_to=wandb")
    with pytest.raises(ConfigError, match="WANDB_MODE must be one of 'online', 'offline', 'disabled', got 'onlin'"):
        open_run(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trainer = open_run(apply_flags(config, ["run.steps=1", "swap.k=1"]), tmp_path / "run", progress=False)
    trainer.train()
    trainer.close()
    assert not list((tmp_path / "run" / "wandb").glob("*run*"))

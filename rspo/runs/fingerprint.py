"""What model a run has started from, by which the one that `policy.path` names when it goes on is known for the same.

A run's folder has it as `base.json`, as an adapter's has that of its base; not where `policy.path` is None, as the
start policy then lies in the run's folder, and not where the weights are sharded.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..config import Config, ConfigError
from ..config.storage import write_text
from ..models.lora import BASE_FILE, fingerprint
from ..models.policy import Policy


def has_fingerprint(config: Config) -> bool:
    """Whether a run with these settings has its start policy's fingerprint."""
    return config.policy.path is not None and config.parallel.shard == "none"


def stored_fingerprint(folder: Path) -> str | None:
    """That of the model which the run in `folder` has started from; None where it has none."""
    path = folder / BASE_FILE
    return json.loads(path.read_text(encoding="utf-8"))["fingerprint"] if path.is_file() else None


def store_fingerprint(folder: Path, start: Policy) -> None:
    """Write that of a new run's start policy. Raises StorageError."""
    write_text(folder / BASE_FILE, json.dumps({"fingerprint": fingerprint(start.model)}) + "\n")


def check_fingerprint(folder: Path, start: Policy) -> None:
    """Raises ConfigError where `start`, as `policy.path` names it, is not what the run in `folder` has started from."""
    expected, found = stored_fingerprint(folder), fingerprint(start.model)
    if expected is not None and expected != found:
        raise ConfigError(
            f"the run in {folder} was trained on another model than policy.path={start.model.name_or_path!r}: its start"
            f" has the fingerprint {expected[:12]}…, this model {found[:12]}…"
        )

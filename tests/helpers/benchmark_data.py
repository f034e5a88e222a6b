"""Where the real data of public benchmarks is, for the tests that want it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_folder(name: str) -> Path:
    """The folder of a benchmark's data: `name` within RSPO_TEST_DATA, or within shared/data beside the repository.
    Skips the test where it is not there."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("RSPO_TEST_DATA") or beside) / name
    if not folder.is_dir():
        pytest.skip(f"no test data: {folder} is not there (RSPO_TEST_DATA can name its parent)")
    return folder

"""Where the data of public benchmarks lies that some tests need; it is not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_folder(name: str) -> Path:
    """A folder of the test data: in the folder that RSPO_TEST_DATA names, by default `shared/data` beside the
    repository. Skips the test where it is not there."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("RSPO_TEST_DATA", beside)) / name
    if not folder.is_dir():
        pytest.skip(f"needs the test data {str(folder)!r}; RSPO_TEST_DATA says where it is")
    return folder

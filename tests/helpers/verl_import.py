"""The real verl, on the CPU, or a skipped test that says why not."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def real_verl() -> None:
    """Import verl on its CPU platform (`verl_platform`). The benchmarks' tests may have left a bare package of that
    name, of which they import single modules (`bench.kernels.imports`)."""
    if "verl" in sys.modules and not hasattr(sys.modules["verl"], "DataProto"):
        for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
            del sys.modules[name]
    try:
        import verl_platform

        verl_platform.start()
        import_module("verl.trainer.ppo.ray_trainer")
    except ImportError as error:
        pytest.skip(f"verl cannot be imported: {error}")

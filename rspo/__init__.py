"""RSPO: a thin trainer for Reward-Swap Policy Optimization (arXiv 2607.04713)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import RSPOTrainer

__all__ = ["RSPOTrainer"]


def __getattr__(name: str) -> Any:
    """`rspo.RSPOTrainer`, imported when it is asked for: the package itself needs no torch."""
    if name == "RSPOTrainer":
        from .api import RSPOTrainer

        return RSPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

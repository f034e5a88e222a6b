"""Where things are."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
"""The repository."""

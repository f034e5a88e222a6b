"""A check that needs no torch, so that settings can be checked without it."""

from __future__ import annotations

from typing import Any


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """One of the listed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")

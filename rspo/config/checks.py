"""Checks of a section's fields, as all sections make them, and the words that several of them allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

SWITCHES = ("auto", "on", "off")
SCHEDULES = ("constant", "linear", "cosine")


class ConfigError(ValueError):
    """A setting that is unknown or impossible; the message names what is allowed."""


class Checks:
    """Checks of a section, each of any number of its fields. They raise ConfigError naming the field.

    Args:
        section: its name in a configuration.
        settings: the section itself.

    `or_none`: None is allowed beside what a check allows.
    """

    def __init__(self, section: str, settings: Any) -> None:
        self.section = section
        self.settings = settings

    def one_of(self, allowed: tuple[str, ...], *fields: str) -> None:
        """One of some words."""
        for name, value in self._values(fields):
            one_of(name, value, allowed)

    def at_least(self, low: float, *fields: str, or_none: bool = False) -> None:
        """A finite number, `low` or more."""
        for name, value in self._values(fields, or_none):
            if not (math.isfinite(value) and value >= low):
                raise ConfigError(f"{name} must be >= {low}, got {value}")

    def positive(self, *fields: str, or_none: bool = False) -> None:
        """A finite number above 0."""
        for name, value in self._values(fields, or_none):
            positive(name, value)

    def fraction(self, *fields: str, below_one: bool = False, or_none: bool = False) -> None:
        """A number from 0 to 1; `below_one`: less than 1."""
        for name, value in self._values(fields, or_none):
            if not (0 <= value < 1 or (value == 1 and not below_one)):
                raise ConfigError(f"{name} must be in [0, 1{')' if below_one else ']'}, got {value}")

    def betas(self) -> None:
        """The field `betas`, Adam's."""
        value = self.settings.betas
        if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
            raise ConfigError(f"{self.section}.betas must be two numbers in [0, 1), got {value}")

    def _values(self, fields: tuple[str, ...], or_none: bool = False) -> Iterator[tuple[str, Any]]:
        """Full names and values."""
        for field in fields:
            value = getattr(self.settings, field)
            if value is not None or not or_none:
                yield f"{self.section}.{field}", value


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError for a word that is not allowed in the field `name`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def positive(name: str, value: float) -> None:
    """Raises ConfigError for what is not a finite number above 0 in the field `name`."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be > 0, got {value}")

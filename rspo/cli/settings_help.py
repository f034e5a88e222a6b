"""What the settings mean, in the words that stand beside them in the source."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from ..config import Config, ConfigError
from ..config.files import flat_settings

INDENT = 24
"""Of meanings, as argparse's."""


def describe_settings(names: Iterable[str]) -> str:
    """Settings, or all of a section, one below the other: full name, value in the default preset, and meaning.

    Raises ConfigError for what is neither.
    """
    config = Config()
    values, parts = flat_settings(config), []
    for name in names:
        found = [full for full in values if full == name or full.startswith(f"{name}.")]
        if not found:
            known = ", ".join(field.name for field in fields(config))
            raise ConfigError(f"{name!r} is neither a setting nor a section; there are {known}")
        parts += [_described(full, values[full], _meaning(config, full)) for full in found]
    return "\n".join(parts)


def describe_sections() -> str:
    """The sections, each with what it is about, and the settings outside of any."""
    config, parts = Config(), []
    for field in fields(config):
        section = getattr(config, field.name)
        if is_dataclass(section):
            first = inspect.cleandoc(type(section).__doc__ or "").partition("\n\n")[0]
            parts.append(_entry(field.name, " ".join(first.split()).rstrip(":")))
        else:
            parts.append(_described(field.name, section, _meaning(config, field.name)))
    return "\n".join(parts)


def _meaning(config: Config, name: str) -> str:
    section, dot, field = name.rpartition(".")
    return field_meanings(type(getattr(config, section) if dot else config)).get(field, "")


def field_meanings(kind: type[Any]) -> dict[str, str]:
    """By the name of a dataclass's field: the string below it in the source, or its entry under "Args" in the class's
    docstring. Fields that need no words have none, and none has any where the source is not there."""
    meanings = _arguments(inspect.cleandoc(kind.__doc__ or "").splitlines())
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except OSError:
        return meanings
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            meanings[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return meanings


def _arguments(lines: Sequence[str]) -> dict[str, str]:
    """The entries under "Args:" of a docstring, of which one may be for several names."""
    if "Args:" not in lines:
        return {}
    entries: list[str] = []
    for line in lines[lines.index("Args:") + 1 :]:
        if not line.startswith("    "):
            break
        if line.startswith("     "):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    parts = [entry.partition(": ") for entry in entries]
    return {name: text for names, _, text in parts for name in names.split(", ")}


def _described(name: str, value: Any, meaning: str) -> str:
    return _entry(f"{name}={value if isinstance(value, str) else json.dumps(value)}", meaning)


def _entry(head: str, text: str) -> str:
    """As argparse lays an option out."""
    width = max(shutil.get_terminal_size().columns - 2, INDENT + 20)
    lines = textwrap.wrap(text, width - INDENT)
    start = f"  {head}"
    if lines and len(start) <= INDENT - 2:
        start = f"{start:<{INDENT}}{lines.pop(0)}"
    return "\n".join([start, *(" " * INDENT + line for line in lines)])

"""The packages that games are played with (alfworld, TextWorld, Fast Downward), imported when first needed.

Importing alfworld makes a folder where ALFWORLD_DATA says, by default under the home directory; here it is imported
with that variable at a folder that exists. Translating a PDDL problem overwrites `sys.argv` and `sys.stdout` for a
while; `translating` puts both back.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from ..base import ResourceError

LIBRARY_MEGABYTES = 34

_TRANSLATOR = threading.Lock()


class GameError(ValueError):
    """A game file that cannot be played; the message says which and why."""


def check_installed() -> None:
    """Raises ImportError that says what to install where a package is missing."""
    for module in ("textworld", "fast_downward", "alfworld.info"):
        _import(module)


@cache
def _import(name: str) -> Any:
    """A module of these packages. Raises ImportError that says what to install."""
    with _harmless_data_folder():
        try:
            return import_module(name)
        except ImportError as error:
            raise ImportError(
                f"ALFWorld cannot be used ({error}); install it with: pip install 'rspo[alfworld]'"
            ) from error


@contextmanager
def _harmless_data_folder() -> Iterator[None]:
    before = os.environ.get("ALFWORLD_DATA")
    if before is None or not os.path.isdir(before):
        os.environ["ALFWORLD_DATA"] = tempfile.gettempdir()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("ALFWORLD_DATA", None)
        else:
            os.environ["ALFWORLD_DATA"] = before


def textworld(name: str = "") -> Any:
    """A module of TextWorld, e.g. "logic"."""
    return _import(f"textworld.{name}" if name else "textworld")


def fast_downward() -> Any:
    """The planner's package: translation of PDDL and the library that holds a game's state."""
    return _import("fast_downward")


def alfworld(name: str) -> Any:
    """A module of the alfworld package, e.g. "gen.constants"."""
    return _import(f"alfworld.{name}")


@contextmanager
def loading_library() -> Iterator[None]:
    """Around what loads a copy of the planner's library. Raises ResourceError where the copy cannot be made or used."""
    try:
        yield
    except OSError as error:
        folder = tempfile.gettempdir()
        try:
            free = f"{shutil.disk_usage(folder).free / 1e6:.0f} MB free"
        except OSError:
            free = "free space unknown"
        raise ResourceError(
            f"the planner's library could not be loaded from the temporary folder {folder} ({free}): {error}; each"
            f" ALFWorld game under way keeps a copy there, of {LIBRARY_MEGABYTES} MB. Make room, set TMPDIR to a folder"
            " that has it and allows programs, or play fewer different games at once (rollout.tasks,"
            " evaluation.episodes, env.workers)"
        ) from error


@contextmanager
def translating() -> Iterator[None]:
    """What the translator overwrites is put back at the end; one translation at a time."""
    with _TRANSLATOR:
        argv, stdout = sys.argv, sys.stdout
        try:
            yield
        finally:
            sys.argv, sys.stdout = argv, stdout

"""Files and folders that are complete under their name or not there at all, whenever the process or machine stops.

They are written beside their place as `.NAME.partial`, brought to the disk (fsync) and renamed. A folder that takes
another's place stands beside it as `.NAME.previous` for the moment between two renames. `tidy` settles what a process
that was killed has left.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .sections import ConfigError

PARTIAL, PREVIOUS = ".partial", ".previous"


class StorageError(OSError):
    """Something could not be written: a full disk, a folder without write permission. The message names the path and
    the reason; what stood there before still does."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a StorageError that names `path` of what goes wrong while it is written."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        raise StorageError(f"{path} could not be written: {_reason(error)}") from error


class DamagedFileError(ConfigError):
    """A file that is there, or should be, cannot be read."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Make a DamagedFileError that names `what` of what safetensors and torch raise where a file is damaged."""
    try:
        yield
    except ConfigError:
        raise
    except (SafetensorError, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedFileError(f"{what} cannot be read ({type(error).__name__}: {error})") from error


def _reason(error: BaseException) -> str:
    """The operating system's words where an exception, or one that it was raised after, has them."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error)


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file. Raises StorageError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file. Raises StorageError."""
    partial = _beside(path, PARTIAL)
    with writing(path):
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill; when the block ends it stands at `path`, instead of what stood there. Raises StorageError.

    What was written is taken away again on an error (a full disk wants the room) or Ctrl-C.
    """
    partial, previous = _beside(path, PARTIAL), _beside(path, PREVIOUS)
    try:
        with writing(path):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            yield partial
            for folder, _, names in os.walk(partial):
                for name in names:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            if path.exists():
                os.rename(path, previous)
            os.rename(partial, path)
            _sync(path.parent)
            if previous.exists():
                shutil.rmtree(previous)
    except (Exception, KeyboardInterrupt):
        tidy(path.parent, path.name)
        raise


def remove_folder(path: Path) -> None:
    """Delete a folder, which is gone from its name at once. Raises StorageError."""
    doomed = _beside(path, PARTIAL)
    with writing(path):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def tidy(folder: Path, name: str = "*") -> None:
    """Delete what was not finished under a name (a pattern) in a folder, and put back what was about to be replaced."""
    for previous in folder.glob(f".{name}{PREVIOUS}"):
        path = folder / previous.name.removeprefix(".").removesuffix(PREVIOUS)
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            os.rename(previous, path)
    for partial in folder.glob(f".{name}{PARTIAL}"):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def check_folder_place(path: Path) -> None:
    """Raises ConfigError where a folder cannot be because a file is in its place, or in that of a folder above it."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), path)
    if there.exists() and not there.is_dir():
        above = "" if there == path else f", because {there} is a file"
        raise ConfigError(f"{path} must be a folder, and {'cannot be one' + above if above else 'is a file'}")


def prepare_folder(path: Path) -> None:
    """Make a folder where it is missing, and try whether files can be written there. Raises StorageError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe{PARTIAL}"
        probe.write_bytes(b"\0")
        probe.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

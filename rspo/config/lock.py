"""One writer at a time in a folder.

A lock is a file in the folder that its owner holds with flock. The kernel lets go of it when the owner's process ends,
however it ends, so a file that a killed process has left is no obstacle, whatever process has its number now. The text
in the file only says who the owner is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from .sections import ConfigError
from .storage import check_folder_place

LOCK_FILE = ".rspo.lock"
PATIENCE = 0.5
"""Seconds that a new owner may take to write who it is."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems without locks answer."""

_held: set[FolderLock] = set()


class FolderInUseError(ConfigError):
    """Another process, or another trainer of this one, writes into the folder."""


class FolderLock:
    """The right to write into a folder, held until `close` or the process's end.

    Args:
        folder: is made where it is missing.
        file: the lock's own place, if that is not in the folder.

    Raises FolderInUseError that names the folder and the process that holds it, ConfigError where a file is in the
    folder's place, OSError where no file can be written. Warns on a file system without locks, where nothing is held.
    """

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        self.folder = folder
        self.path = file or folder / LOCK_FILE
        check_folder_place(self.path.parent)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = self._taken()
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()} ({_command()})\n".encode(), 0)
            _held.add(self)

    def _taken(self) -> int | None:
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner before may have deleted the file between the two calls; then it is no longer the lock.
                if os.path.exists(self.path) and os.path.samestat(os.fstat(file), os.stat(self.path)):
                    return file
            except BlockingIOError:
                os.close(file)
                raise FolderInUseError(_in_use(self.folder, self.path)) from None
            except OSError as error:
                os.close(file)
                if error.errno not in UNSUPPORTED:
                    raise
                warnings.warn(
                    f"{self.folder} is on a file system without locks ({error.strerror}): see to it that no other"
                    " process writes there",
                    stacklevel=4,
                )
                return None
            os.close(file)

    def close(self) -> None:
        """Let others write. May be called again."""
        _held.discard(self)
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold a folder's lock while the block runs; a part of what already holds it in this process may go on.

    Raises what FolderLock raises.
    """
    place = folder.resolve()
    if any(lock.path.parent.resolve() == place for lock in _held):
        yield
        return
    with FolderLock(folder):
        yield


def check_unused(folder: Path) -> None:
    """Raises FolderInUseError where the folder's lock is held; writes nothing."""
    path = folder / LOCK_FILE
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        file = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(_in_use(folder, path)) from None
        except OSError:  # no locks here
            return
        finally:
            os.close(file)


def _in_use(folder: Path, path: Path) -> str:
    owner, until = "", time.monotonic() + PATIENCE
    while not owner and time.monotonic() < until:
        with suppress(OSError):
            owner = path.read_text(encoding="utf-8", errors="replace").strip()
        time.sleep(0 if owner else 0.02)
    return (
        f"{folder} is being written by {owner or 'another process'}: wait until that has ended, end it, or choose"
        " another folder"
    )


def _command() -> str:
    return " ".join([os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]])[:200]


def _forget_locks() -> None:
    """In a forked process: what it was given of its parent's locks must not outlive the parent."""
    for lock in _held:
        if lock._file is not None:
            os.close(lock._file)
            lock._file = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)

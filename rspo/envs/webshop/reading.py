"""Reading JSON that may be compressed and large, with errors that name file and line."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_NOT_SPACE = re.compile(r"\S")
_CHUNK = 1 << 20
_LARGEST_RECORD = 1 << 24  # characters; what is longer than that is a record whose end is missing


class DataError(ValueError):
    """Data that cannot be used; the message names the file and says what to do."""


def read_json(path: Path) -> Any:
    """The one value in a file. Raises DataError."""
    with _opened(path) as file:
        text = file.read()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, error.lineno, error.colno, error.msg) from error
    except RecursionError as error:
        raise _damaged(path, 1, 1, _TOO_DEEP) from error


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a file and where each stands ("line 7"): one a line in `.jsonl` files, else the elements of one
    array, which is never in memory as a whole. Raises DataError."""
    with _opened(path) as file:
        yield from _lines(path, file) if ".jsonl" in path.suffixes else _ArrayReader(path, file).elements()


def _lines(path: Path, file: TextIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise _damaged(path, number, error.colno, error.msg) from error
        except RecursionError as error:
            raise _damaged(path, number, 1, _TOO_DEEP) from error


class _ArrayReader:
    """Reads the elements of one array from a file piece by piece, and knows at which line and column it stands."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file
        self._text, self._at = "", 0
        self._line, self._line_start = 1, 0  # the latter counts in `_text` and may lie before it
        self._decoder = json.JSONDecoder()

    def elements(self) -> Iterator[tuple[str, Any]]:
        self._take("[")
        if self._peek() == "]":
            return
        number, after = 0, ","
        while after == ",":
            self._peek()
            number += 1
            place = f"line {self._line}, product {number}"
            yield place, self._value()
            after = self._take(",]")

    def _refill(self) -> bool:
        """Drop what was read and read more. False at the end of the file."""
        more = self._file.read(_CHUNK)
        self._line_start -= self._at
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)

    def _advance(self, to: int) -> None:
        newlines = self._text.count("\n", self._at, to)
        if newlines:
            self._line += newlines
            self._line_start = self._text.rindex("\n", self._at, to) + 1
        self._at = to

    def _peek(self) -> str:
        """The next character that is no white space, "" at the end of the file."""
        while True:
            found = _NOT_SPACE.search(self._text, self._at)
            self._advance(found.start() if found else len(self._text))
            if found:
                return found.group()
            if not self._refill():
                return ""

    def _take(self, expected: str) -> str:
        character = self._peek()
        if not character or character not in expected:
            wanted = " or ".join(expected)
            raise self._damage(f"expected {wanted}, found {character or 'the end of the file'}")
        self._advance(self._at + 1)
        return character

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # It may only be cut off where the text in memory ends.
                place = error.pos - self._at
                if len(self._text) - self._at > _LARGEST_RECORD or not self._refill():
                    self._advance(self._at + place)
                    raise self._damage(error.msg) from error
                continue
            except RecursionError as error:
                raise self._damage(_TOO_DEEP) from error
            self._advance(end)
            return value

    def _damage(self, reason: str) -> DataError:
        return _damaged(self._path, self._line, self._at - self._line_start + 1, reason)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: it is not UTF-8 text ({error.reason}). {_GET_AGAIN}") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: it cannot be unpacked ({error}). {_GET_AGAIN}") from error


_GET_AGAIN = "Get the file again."
_TOO_DEEP = "brackets are nested too deeply"


def _damaged(path: Path, line: int, column: int, reason: str) -> DataError:
    return DataError(f"{path} is damaged: line {line}, column {column}: {reason}. {_GET_AGAIN}")

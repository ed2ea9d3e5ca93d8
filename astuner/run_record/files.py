"""Writing that survives a kill and a full disk: whole files by rename, rows by append."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.errors import RecordError

_REMEDIES = {
    errno.ENOSPC: "free some space there, or choose another place with --exp-dir",
    errno.EDQUOT: "free some of your quota, or choose another place with --exp-dir",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or choose another place with --exp-dir",
    errno.EACCES: "make it writable for this user, or choose another place with --exp-dir",
    errno.EPERM: "make it writable for this user, or choose another place with --exp-dir",
    errno.EROFS: "this file system is read-only: choose another place with --exp-dir",
    errno.ENAMETOOLONG: "choose a shorter experiment_name or --exp-dir",
    errno.ENOTDIR: "a file stands where a folder is needed: remove it, or choose another place with --exp-dir",
    errno.EEXIST: "a file stands where a folder is needed: remove it, or choose another place with --exp-dir",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the body into a `RecordError` that names `path`, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be written")
        reason = error.strerror or str(error)
        raise RecordError(f"cannot write the run record at {path}: {reason}; {remedy}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader sees the old content or the new one, never a part.

    Missing folders are made. The data outlives a kill of this process; it is not forced to the disk.

    Raises:
        RecordError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with storing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            os.replace(partial, path)
        except OSError:
            # Missing when the folder itself could not be made.
            with _ignoring_os_errors():
                partial.unlink()
            raise


@contextmanager
def _ignoring_os_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.debug("left a partial file behind: {}", error)


def dump_json(value: object) -> bytes:
    """Return compact, strictly standard JSON in UTF-8, without a newline.

    Lone surrogates, which UTF-8 cannot hold, are written as `\\uXXXX` escapes, so that they come back as they were.

    Raises:
        ValueError, TypeError: `value` holds something that JSON has not (`to_plain` replaces all of that).
    """
    try:
        return _dumps(value, ascii_only=False).encode()
    except UnicodeEncodeError:
        return _dumps(value, ascii_only=True).encode()


def _dumps(value: object, ascii_only: bool) -> str:
    return json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))


class JsonLines:
    """An append-only file of one JSON object a line; safe to append to from several threads."""

    def __init__(self, path: Path) -> None:
        """Open `path`, making it where it is missing and cutting off a last line that a kill left unfinished.

        Raises:
            RecordError: the file cannot be opened.
        """
        self.path = path
        self._lock = threading.Lock()
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
            self._cut_torn_line()

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row of plain values; it is in the file, whole, when this returns.

        Raises:
            RecordError: the row cannot be written; the file is then as it was.
        """
        line = dump_json(row) + b"\n"
        with self._lock, storing(self.path):
            size = os.fstat(self._fd).st_size
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._fd, line[written:])
            except OSError:
                os.ftruncate(self._fd, size)
                raise

    def keep_only(self, keep: Callable[[Mapping[str, Any]], bool]) -> int:
        """Remove the rows for which `keep` is false, all at once; return how many went.

        Raises:
            RecordError: the file cannot be read or written.
        """
        with self._lock:
            rows = list(read_json_lines(self.path))
            kept = [row for row in rows if keep(row)]
            if len(kept) < len(rows):
                write_atomically(self.path, b"".join(dump_json(row) + b"\n" for row in kept))
                os.close(self._fd)
                with storing(self.path):
                    self._fd = self._open()
            return len(rows) - len(kept)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            logger.warning("{}: cut off a last line that was never finished", self.path)
            os.ftruncate(self._fd, whole)


Damaged = Callable[[RecordError], None]
"""Told of a line that cannot be read, and is left out."""


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines; a last line without its newline is still being written and left out.

    Raises:
        RecordError: the file cannot be read, or a line is no JSON object (names the line).
    """
    for _, row in numbered_json_lines(path):
        yield row


def numbered_json_lines(path: Path, damaged: Damaged | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Be `read_json_lines`, with the number of each line from 1.

    Args:
        path: the file.
        damaged: told of lines that are no JSON objects, instead of raising.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    try:
                        yield number, _parsed_row(line, path, number)
                    except RecordError as error:
                        if damaged is None:
                            raise
                        damaged(error)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


def _parsed_row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise RecordError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}")
    return row

"""Files that survive a kill and a full disk: atomic replacement and append-only JSON lines."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from loguru import logger

from astuner.errors import RecordError

T = TypeVar("T")
_REMEDIES = {
    errno.ENOSPC: "free some space there, or choose another folder with --exp-dir",
    errno.EDQUOT: "free some of your quota, or choose another folder with --exp-dir",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or choose another folder with --exp-dir",
    errno.EACCES: "make it writable for this user, or choose another folder with --exp-dir",
    errno.EPERM: "make it writable for this user, or choose another folder with --exp-dir",
    errno.EROFS: "this file system is read-only: choose another folder with --exp-dir",
    errno.ENAMETOOLONG: "choose a shorter experiment_name or --exp-dir",
    errno.ENOTDIR: "a file exists where a folder is needed: remove it, or choose another folder with --exp-dir",
    errno.EEXIST: "a file exists where a folder is needed: remove it, or choose another folder with --exp-dir",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
# Bytes that `ReadPosition` hashes, to detect that a file was rewritten.
_HASHED_BYTES = 4096


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` of the block into a `RecordError` that names `path`, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that the folder exists and can be written")
        reason = error.strerror or str(error)
        raise RecordError(f"cannot write the run record at {path}: {reason}; {remedy}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file, so that readers see either the old or the new content. Missing folders are created.

    The data survives if this process is killed, but not if its machine crashes, because it is not synced to the disk.

    Raises:
        RecordError: If the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with write_errors(path):
        try:
            try:
                partial.write_bytes(data)
            except FileNotFoundError:  # the first file of its folder
                path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_bytes(data)
            os.replace(partial, path)
        except OSError:
            try:
                partial.unlink()
            except OSError as error:  # The folder may not exist.
                logger.debug("cannot remove a partial file: {}", error)
            raise


def dump_json(value: object) -> bytes:
    """Return compact, standard JSON in UTF-8, without a newline.

    Lone surrogates, which UTF-8 cannot represent, are written as `\\uXXXX` escapes and survive a round trip.

    Raises:
        ValueError, TypeError: If JSON cannot represent `value`; convert it with `to_jsonable` first.
    """

    def dumps(*, ensure_ascii: bool) -> bytes:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False, separators=(",", ":")).encode()

    try:
        return dumps(ensure_ascii=False)
    except UnicodeEncodeError:
        return dumps(ensure_ascii=True)


def read_json_document(
    path: Path, content: str, format_number: int, recover: Callable[[bytes], object] = lambda _: None
) -> dict[str, Any]:
    """Return the JSON object of a file whose key `format` has the expected number.

    Args:
        path: The file.
        content: The expected content, for the error: "a rescored run".
        format_number: The expected number.
        recover: Returns the object of a file that is not JSON, or None.

    Raises:
        RecordError: If the file cannot be read, or holds something else.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        document = recover(data)
        if document is None:
            raise RecordError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(document, dict) or document.get("format") != format_number:
        raise RecordError(f"{path} is not {content} of format {format_number}")
    return document


class JsonLines:
    """An append-only file of one JSON object per line. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`, and remove an incomplete last line that a kill has left.

        Raises:
            RecordError: If the file cannot be opened.
        """
        self.path = path
        self._lock = threading.RLock()
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
            data = path.read_bytes()
            complete = data.rfind(b"\n") + 1
            if complete < len(data):
                logger.warning("{}: removed an incomplete last line", path)
                os.ftruncate(self._fd, complete)
            self._size = complete

    def append(self, *rows: Mapping[str, object]) -> None:
        """Append rows of JSON values. The complete lines are in the file when this returns.

        Raises:
            RecordError: If the rows cannot be written. The file is then unchanged.
        """
        lines = b"".join(dump_json(row) + b"\n" for row in rows)
        with self._lock:
            self.check_in_place()
            with write_errors(self.path):
                size = os.fstat(self._fd).st_size
                try:
                    written = 0
                    while written < len(lines):
                        written += os.write(self._fd, lines[written:])
                except OSError:
                    os.ftruncate(self._fd, size)
                    raise
            self._size = size + len(lines)

    def check_in_place(self) -> None:
        """Check that the file is still at its path.

        Raises:
            RecordError: If it was deleted, moved, replaced or shortened. Rows would be lost without a notice.
        """
        with self._lock:
            opened, size = os.fstat(self._fd), self._size
            try:
                found = os.stat(self.path)
            except OSError:
                found = None
        if found is None or (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
            what = "was deleted, moved or replaced"
        elif opened.st_size < size:
            what = f"was shortened from {size} to {opened.st_size} bytes"
        else:
            return
        raise RecordError(
            f"{self.path} {what} while the run was writing to it, so the run stops. Do not change the folder of a "
            "running run. To resume, restore the folder and run the same command again. Without the folder, the run "
            "starts from scratch"
        )

    def retain_rows(self, identify: Callable[[Mapping[str, Any]], Hashable | None]) -> tuple[int, int]:
        """Keep the last row of each identity, and remove the other rows, atomically.

        Lines that are not valid rows are removed too. A copy of the original file is then kept with the suffix
        `.damaged`.

        Args:
            identify: Returns what identifies a row, or None for a row to remove. Raises `RecordError` for a row that is
                not valid.

        Returns:
            How many rows, and how many invalid lines were removed.

        Raises:
            RecordError: If the file cannot be read or written.
        """
        kept: dict[Hashable, bytes] = {}
        removed, damaged = 0, list[str]()
        with self._lock:
            for number, row in read_json_lines(self.path, lambda error: damaged.append(str(error))):
                try:
                    identity = identify(row)
                except RecordError as error:
                    damaged.append(f"line {number}: {error}")
                    continue
                if identity is None or identity in kept:
                    removed += 1
                if identity is not None:
                    kept[identity] = dump_json(row) + b"\n"
            if removed or damaged:
                if damaged:
                    write_atomically(self.path.with_name(f"{self.path.name}.damaged"), self.path.read_bytes())
                    logger.warning(
                        "{}: removed {} invalid lines; a copy of the original file has the suffix .damaged. The first: "
                        "{}", self.path, len(damaged), damaged[0],
                    )  # fmt: skip
                write_atomically(self.path, b"".join(kept.values()))
                os.close(self._fd)
                with write_errors(self.path):
                    self._fd = self._open()
                    self._size = os.fstat(self._fd).st_size
            return removed, len(damaged)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


OnDamaged = Callable[[RecordError], None]
"""Called with the error of a line that cannot be read. The line is skipped."""


def read_json_lines(path: Path, on_damaged: OnDamaged | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the object of each line. A last line without a newline is still being written.

    Args:
        path: The file.
        on_damaged: Called for lines that are no JSON objects; without it, they raise.

    Raises:
        RecordError: If the file cannot be read, or a line is not a JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    continue
                try:
                    row, reason = json.loads(line), ""
                except (ValueError, RecursionError) as error:
                    row, reason = None, f" ({error})"
                if isinstance(row, dict):
                    yield number, row
                    continue
                damaged = RecordError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}{reason}")
                if on_damaged is None:
                    raise damaged
                on_damaged(damaged)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


def read_rows(path: Path, parse: Callable[[Mapping[str, Any]], T], on_damaged: OnDamaged | None = None) -> list[T]:
    """Return what `parse` makes from each line's object; arguments and errors as for `read_json_lines`.

    `parse` raises `RecordError` for an object that is not valid, which counts as a damaged line.
    """
    return parsed_rows(((path, number, row) for number, row in read_json_lines(path, on_damaged)), parse, on_damaged)


def parsed_rows(
    rows: Iterable[tuple[Path, int, Mapping[str, Any]]],
    parse: Callable[[Mapping[str, Any]], T],
    on_damaged: OnDamaged | None,
) -> list[T]:
    """Return what `parse` makes from each `(file, line number, object)`; arguments and errors as for `read_rows`."""
    parsed = []
    for file, number, row in rows:
        try:
            parsed.append(parse(row))
        except RecordError as error:
            damaged = RecordError(f"{file}, line {number}: {error}")
            if on_damaged is None:
                raise damaged from error
            on_damaged(damaged)
    return parsed


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How many bytes of a growing file were read, and a hash over the last ones, which detects a rewritten file."""

    offset: int = 0
    tail: str = ""


def read_new_lines(path: Path, position: ReadPosition) -> tuple[list[bytes], ReadPosition, bool]:
    """Return the complete lines after `position`, the new position, and whether reading restarted at the beginning.

    Reading restarts if the file was rewritten, as by a resumed run. A missing file has no lines.

    Raises:
        RecordError: If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            restarted = _hash_before(file, position.offset) != position.tail
            start = 0 if restarted else position.offset
            file.seek(start)
            data = file.read()
            complete = data.rfind(b"\n") + 1
            end = start + complete
            return data[:complete].split(b"\n")[:-1], ReadPosition(end, _hash_before(file, end)), restarted
    except FileNotFoundError:
        return [], ReadPosition(), position != ReadPosition()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


def _hash_before(file: BinaryIO, offset: int) -> str:
    if offset == 0:
        return ""
    start = max(0, offset - _HASHED_BYTES)
    file.seek(start)
    return hashlib.sha256(file.read(offset - start)).hexdigest()

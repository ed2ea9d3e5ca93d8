"""A run's log files, read in pieces with bounded size, and its failed episodes' tracebacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from astuner.errors import RecordError
from astuner.run_record.episode_file import read_episode_document
from astuner.run_record.recorded_run import file_in_run
from astuner.system.redaction.redactor import redact

_PATTERNS = ("*.log", "services/*.log")
_MAX_FILES = 200
# Bytes of a piece, and bytes that a search reads in one request.
_PIECE = 64 * 2**10
_SEARCHED = 16 * 2**20
_MAX_MATCHES = 200
_MAX_LINE = 2000
_MAX_TRACEBACKS = 20
_MAX_TRACEBACK = 20_000
_MAX_EPISODE_BYTES = 32 * 2**20
# Colours and cursor movements of terminals.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# The text of a progress bar before its last update.
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\n])", re.MULTILINE)


def log_files(folder: Path) -> list[dict[str, Any]]:
    """Return the log files in the run's `folder`: the name relative to it, the size in bytes, the modification time.

    `run.log` is the first. Files outside of the folder, to which links point, are left out.
    """
    found = []
    for path in sorted(path for pattern in _PATTERNS for path in folder.glob(pattern)):
        name = path.relative_to(folder).as_posix()
        try:
            status = file_in_run(folder, name).stat()
        except (RecordError, OSError):
            continue
        if path.is_file():
            found.append({"name": name, "size": status.st_size, "modified": status.st_mtime})
    return sorted(found, key=lambda file: (file["name"] != "run.log", file["name"]))[:_MAX_FILES]


def read_piece(folder: Path, name: str, *, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """Return a piece of a log file that begins and ends with whole lines, if they are not too long.

    Args:
        folder: The run's folder.
        name: A name that `log_files` returns.
        before: Byte at which the piece ends; by default the end of the file.
        after: Byte at which the piece begins instead.

    Returns:
        `text`; `start` and `end`, its bytes in the file; and the `size` of the file.

    Raises:
        RecordError: If there is no such log file, or it cannot be read.
    """
    with _open(folder, name) as file:
        size = file.seek(0, 2)
        if after is not None:
            start, end = min(after, size), min(after + _PIECE, size)
        else:
            end = size if before is None else min(before, size)
            start = max(0, end - _PIECE)
        file.seek(start)
        data = file.read(end - start)
        # A piece within one long line is shown as it is, so that earlier pieces can be read.
        if after is None and start > 0 and 0 <= (line := data.find(b"\n")) < len(data) - 1:
            start, data = start + line + 1, data[line + 1 :]
        # The last line of a live run may be incomplete.
        if after is not None and (line := data.rfind(b"\n")) >= 0:
            end, data = start + line + 1, data[: line + 1]
    return {"text": _clean(data), "start": start, "end": end, "size": size}


def search_log(folder: Path, name: str, text: str, before: int | None = None) -> dict[str, Any]:
    """Return the last lines of a log file that contain a text, without regard to case, the latest line first.

    Args:
        folder, name: As for `read_piece`.
        text: The text.
        before: Byte from which the search goes towards the beginning; by default the end of the file.

    Returns:
        `matches`, each with the `line` and its first byte (`start`); `searched`, the byte at which the search stopped,
        0 at the beginning of the file; and the `size` of the file.

    Raises:
        RecordError: If there is no such log file, or it cannot be read.
    """
    needle = text.lower()
    matches: list[dict[str, Any]] = []
    with _open(folder, name) as file:
        size = file.seek(0, 2)
        end = size if before is None else min(before, size)
        stop = max(0, end - _SEARCHED)
        while end > stop and len(matches) < _MAX_MATCHES:
            start = max(stop, end - _PIECE * 4)
            file.seek(start)
            data = file.read(end - start)
            if start > 0 and (line := data.find(b"\n")) >= 0 and line + 1 < len(data):
                start, data = start + line + 1, data[line + 1 :]
            if needle in data.decode(errors="replace").lower():
                matches += _matches(data, start, needle)
            end = start
        if len(matches) > _MAX_MATCHES:
            matches = matches[:_MAX_MATCHES]
            end = matches[-1]["start"]
    return {"matches": matches, "searched": end, "size": size}


def tracebacks(folder: Path, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the `groups` of `queries.failures`, each with its latest episode's `traceback` or None."""
    return [{**group, "traceback": _traceback(folder, group["path"])} for group in groups[:_MAX_TRACEBACKS]]


def _traceback(folder: Path, path: str) -> str | None:
    try:
        file = file_in_run(folder, path)
        if file.stat().st_size > _MAX_EPISODE_BYTES:
            return "The file of the episode is too large to be read for this list; open the episode."
        episode = read_episode_document(file).get("episode")
    except (RecordError, OSError) as error:
        return str(error)
    text = episode.get("error_traceback") if isinstance(episode, Mapping) else None
    if not isinstance(text, str):
        return None
    # The last lines name the exception.
    return text if len(text) <= _MAX_TRACEBACK else f"…\n{text[-_MAX_TRACEBACK:]}"


def _open(folder: Path, name: str) -> BinaryIO:
    if name not in (names := [file["name"] for file in log_files(folder)]):
        raise RecordError(f"the run has no log {name[:80]!r}; its logs: {', '.join(names[:10]) or 'none'}")
    try:
        return file_in_run(folder, name).open("rb")
    except OSError as error:
        raise RecordError(f"cannot read the log {name}: {error.strerror or error}") from error


def _matches(data: bytes, start: int, needle: str) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines(keepends=True):
        if needle in (text := line.decode(errors="replace")).lower():
            place = max(0, text.lower().find(needle) - _MAX_LINE // 2)
            shown = _clean(text[place : place + _MAX_LINE].encode()).rstrip("\n")
            found.append({"start": start, "line": f"…{shown}" if place else shown})
        start += len(line)
    return found[::-1]


def _clean(data: bytes) -> str:
    """Return text as a terminal shows it, without colours. Logs are redacted when they are written, and here again."""
    return redact(_OVERWRITTEN.sub("", _ESCAPES.sub("", data.decode(errors="replace").replace("\r\n", "\n"))))

"""Reads a growing file of JSON lines bit by bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from astuner.errors import RecordError

_TAIL = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """How far a file was read.

    Attributes:
        offset: bytes read.
        tail: a hash of the last bytes before `offset`; a file that was rewritten has others there.
    """

    offset: int = 0
    tail: str = ""


def read_lines_after(path: Path, place: Place) -> tuple[list[bytes], Place, bool]:
    """Return the whole lines after `place`, the new place, and whether the file was read from its start again.

    It had to where it was rewritten since, as a resumed run does. A file that is not there has no lines.

    Raises:
        RecordError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            anew = _tail(file, place.offset) != place.tail
            start = 0 if anew else place.offset
            file.seek(start)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            end = start + whole
            return data[:whole].split(b"\n")[:-1], Place(end, _tail(file, end)), anew
    except FileNotFoundError:
        return [], Place(), place != Place()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error


def _tail(file: BinaryIO, offset: int) -> str:
    if offset == 0:
        return ""
    start = max(0, offset - _TAIL)
    file.seek(start)
    return hashlib.sha256(file.read(offset - start)).hexdigest()

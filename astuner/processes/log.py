"""What a process prints, without secrets: in the run record, and its last lines in errors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TextIO

from astuner.run_record import RedactingStream, redact
from astuner.run_record.files import storing

_TAIL_LINES = 20
_KEPT_LINES = 10_000
_LONGEST_LINE = 2**20


class ProcessLog:
    """The log of one process, over all its starts.

    Services start before the run has a record, since tasks may come from one. Until `open`, lines are kept (the last
    10,000 of them).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._file: TextIO | None = None
        self._stream: RedactingStream | None = None

    def follow(self, output: IO[bytes]) -> threading.Thread:
        """Write each line of `output` as it comes, in a thread that ends with it."""
        thread = threading.Thread(target=self._copy, args=(output,), name=f"log of {self._name}", daemon=True)
        thread.start()
        return thread

    def _copy(self, output: IO[bytes]) -> None:
        with output:
            while line := output.readline(_LONGEST_LINE):
                self._write(line.decode(errors="replace").rstrip("\r\n"))

    def _write(self, line: str) -> None:
        with self._lock:
            self._tail.append(line)
            if self._stream is None:
                self._kept.append(line)
            else:
                self._stream.write(line + "\n")

    def open(self, folder: Path) -> Path:
        """Write to `services/{name}.log` of the run's `folder` from now on, what was kept first; return the file.

        Raises:
            RecordError: the file cannot be opened.
        """
        path = folder / "services" / f"{self._name}.log"
        with storing(path):
            path.parent.mkdir(exist_ok=True)
            file = path.open("a", encoding="utf-8")
        with self._lock:
            self._file, self._stream = file, RedactingStream(file)
            while self._kept:
                self._stream.write(self._kept.popleft() + "\n")
        return path

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self._stream = None

    def tail(self) -> str:
        """The last lines, for an error's message."""
        with self._lock:
            return last_lines(list(self._tail))


def last_lines(lines: Sequence[str]) -> str:
    """The last 20 of `lines`, without secrets, for an error's message."""
    if not lines:
        return "it printed nothing"
    return redact("its last lines:\n" + "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]))

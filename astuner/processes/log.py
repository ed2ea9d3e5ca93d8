"""Redacted output of processes, for the run record and for error messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TextIO

from astuner.run_record.files import write_errors
from astuner.system.redaction import StreamRedactor, current_redactor, redact
from astuner.system.redaction.output import RedactingStream

_TAIL_LINES = 20
_BUFFERED_LINES = 10_000
_MAX_LINE_BYTES = 2**20


class ProcessLog:
    """The log of one process across its restarts.

    Services start before the run record exists, because tasks may come from a service. Until `open`, the last 10,000
    lines are buffered.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._buffer: deque[str] = deque(maxlen=_BUFFERED_LINES)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._file: TextIO | None = None
        self._stream: RedactingStream | None = None

    def follow(self, output: IO[bytes]) -> threading.Thread:
        """Log every line of `output`, in a thread that ends with it."""
        thread = threading.Thread(target=self._copy, args=(output,), name=f"log of {self._name}", daemon=True)
        thread.start()
        return thread

    def _copy(self, output: IO[bytes]) -> None:
        redactor = StreamRedactor(current_redactor)  # a private key has several lines
        with output:
            while raw := output.readline(_MAX_LINE_BYTES):
                self._add(redactor.feed(raw.decode(errors="replace").rstrip("\r\n") + "\n"))
        self._add(redactor.finish())

    def _add(self, text: str) -> None:
        with self._lock:
            for line in text.split("\n")[:-1]:
                self._tail.append(line)
                if self._stream is None:
                    self._buffer.append(line)
                else:
                    self._stream.write(line + "\n")

    def open(self, folder: Path) -> Path:
        """Write the buffered and all further lines to `services/{name}.log` in the run's folder; return the file.

        Raises:
            RecordError: the file cannot be opened.
        """
        path = folder / "services" / f"{self._name}.log"
        with write_errors(path):
            path.parent.mkdir(exist_ok=True)
            file = path.open("a", encoding="utf-8")
        with self._lock:
            self._file, self._stream = file, RedactingStream(file)
            while self._buffer:
                self._stream.write(self._buffer.popleft() + "\n")
        return path

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = self._stream = None

    def has(self, text: str) -> bool:
        """Return whether one of the last lines contains a text."""
        with self._lock:
            return not text or any(text in line for line in self._tail)

    def tail(self) -> str:
        """Return the last lines, for an error message."""
        with self._lock:
            return last_lines(list(self._tail))


def last_lines(lines: Sequence[str]) -> str:
    """Return the last 20 lines without secrets, for an error message."""
    if not lines:
        return "it printed nothing"
    return redact("its last lines:\n" + "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]))

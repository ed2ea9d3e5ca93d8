"""Log and standard streams without secrets: `run.log`, and redaction of what a process prints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from loguru import logger

from astuner.run_record.files import write_errors
from astuner.run_record.secrets import redact

_FILE = "run.log"
_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <8} | {name}:{line} | {message}"


class RedactingStream:
    """A sink for loguru that removes secrets from complete records, including tracebacks.

    Use it for every sink: `logger.add(RedactingStream(sys.stderr), diagnose=False)`. (`diagnose=True` would print the
    values of variables.) Records that cannot be written are lost, with one note on stderr, as logging must not stop a
    run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_failed = False

    def write(self, record: str) -> None:
        """Write one formatted record without its secrets."""
        try:
            self._stream.write(redact(record))
            self._stream.flush()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                sys.stderr.write(f"astuner: cannot write the log ({error}); later records may be missing from it\n")

    def flush(self) -> None:
        """Do nothing: every record is flushed when it is written."""

    def isatty(self) -> bool:
        """Return whether the stream is a terminal, from which loguru decides on colours."""
        return self._stream.isatty()


class LogFile:
    """Appends loguru's records of level DEBUG and above to `run.log`."""

    def __init__(self, folder: Path) -> None:
        """Open the log in the run's `folder`.

        Raises:
            RecordError: If the file cannot be opened.
        """
        path = folder / _FILE
        with write_errors(path):
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._handler = logger.add(
            RedactingStream(self._file), format=_FORMAT, level="DEBUG", colorize=False, backtrace=False, diagnose=False
        )

    def close(self) -> None:
        """Stop logging to the file and close it."""
        try:
            logger.remove(self._handler)
        except ValueError:
            logger.debug("the handler of {} was already removed", self._file.name)
        try:
            self._file.close()
        except OSError as error:  # Buffered records did not fit on the disk; the stream has reported it.
            logger.debug("closing {}: {}", self._file.name, error)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Remove secrets from what the process prints in the block."""
    earlier = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    _redact_streams()
    try:
        yield
    finally:
        for name, stream in earlier.items():
            setattr(sys, name, stream)


def redact_output() -> None:
    """Remove secrets from all later output and log records of this process, a worker whose output is stored."""
    _redact_streams()
    logger.remove()
    if sys.stderr is not None:
        logger.add(RedactingStream(sys.stderr), diagnose=False)


def _redact_streams() -> None:
    for name in ("stdout", "stderr"):
        # None if the process was started with the stream closed.
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, _RedactedStream(stream))


class _RedactedStream:
    """A text stream that removes secrets from each written piece."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

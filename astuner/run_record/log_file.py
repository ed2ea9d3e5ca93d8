"""`run.log`, and redacted logging in general."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from loguru import logger

from astuner.run_record.files import storing
from astuner.run_record.secrets import redact

_FILE = "run.log"
_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <8} | {name}:{line} | {message}"


class RedactingStream:
    """A text stream for loguru that removes secrets from whole records, tracebacks included.

    Use it for every sink: `logger.add(RedactingStream(sys.stderr), diagnose=False)`. (`diagnose=True` would print the
    values of variables.) A record that cannot be written is lost, which is said once on stderr: logging never stops a
    run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed = False

    def write(self, record: str) -> None:
        """Write one formatted record without its secrets."""
        try:
            self._stream.write(redact(record))
            self._stream.flush()
        except OSError as error:
            if not self._failed:
                self._failed = True
                sys.stderr.write(f"astuner: cannot write the log ({error}); later records may be missing from it\n")

    def flush(self) -> None:
        """Do nothing: every record is flushed as it is written."""

    def isatty(self) -> bool:
        """Say whether the stream is a terminal; loguru asks, to decide on colours."""
        return self._stream.isatty()


class LogFile:
    """Sends all of loguru's records of level DEBUG and above to `run.log`, appending."""

    def __init__(self, folder: Path) -> None:
        """Open the log in the run's `folder`.

        Raises:
            RecordError: it cannot be opened.
        """
        path = folder / _FILE
        with storing(path):
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._handler = logger.add(
            RedactingStream(self._file), format=_FORMAT, level="DEBUG", colorize=False, backtrace=False, diagnose=False
        )

    def close(self) -> None:
        """Stop logging to the file, where nobody else has done so, and close it."""
        try:
            logger.remove(self._handler)
        except ValueError:
            logger.debug("the handler of {} was already removed", self._file.name)
        try:
            self._file.close()
        # Records that did not fit on the disk; the stream has said so.
        except OSError as error:
            logger.debug("closing {}: {}", self._file.name, error)

"""`run.log`."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from astuner.run_record.files import write_errors
from astuner.system.redaction.output import RedactingStream

_FILE = "run.log"
_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} | {level: <8} | {name}:{line} | {message}"


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

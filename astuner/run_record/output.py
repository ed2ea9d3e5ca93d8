"""What a process prints, without secrets."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from loguru import logger

from astuner.run_record.log_file import RedactingStream
from astuner.run_record.secrets import redact


@contextlib.contextmanager
def output_redacted() -> Iterator[None]:
    """Keep secrets out of what is printed in the block."""
    with _redacted("stdout"), _redacted("stderr"):
        yield


def redact_output() -> None:
    """Keep secrets out of what this process prints and logs from now on: a worker's, whose output others keep."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, _RedactedStream(stream))
    logger.remove()
    if sys.stderr is not None:
        logger.add(RedactingStream(sys.stderr), diagnose=False)


@contextlib.contextmanager
def _redacted(name: str) -> Iterator[None]:
    before = getattr(sys, name)
    if before is None:  # the process was started with the stream closed
        yield
        return
    setattr(sys, name, _RedactedStream(before))
    try:
        yield
    finally:
        setattr(sys, name, before)


class _RedactedStream:
    """A text stream that passes everything on, each written piece without its secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""What reaches the terminal beside our own messages: third-party noise goes to the log, secrets go nowhere."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TextIO

from loguru import logger

from astuner.run_record import output_redacted

FILE_ONLY = {"file_only": True}
"""Bound to a log record (`logger.bind(**FILE_ONLY)`), keeps it off the console: run.log alone has it."""


@contextlib.contextmanager
def tidy_output() -> Iterator[None]:
    """Keep progress bars and developers' warnings of libraries off the terminal, and secrets out of what is printed.

    Warnings go to run.log. What a workflow prints is shown without the values of keys and tokens.
    """
    with _quiet_transformers(), _quiet_hub(), _warnings_in_the_log(), output_redacted():
        yield


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    # Its warnings are about retries; what they came to is in the error that ends them.
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def _warnings_in_the_log() -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        logger.bind(**FILE_ONLY).warning("{}:{}: {}: {}", filename, lineno, category.__name__, message)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before

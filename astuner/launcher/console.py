"""Terminal output: log lines and errors, without secrets, control characters or library noise."""

from __future__ import annotations

import contextlib
import re
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loguru import logger
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from astuner.plugin import raised_at
from astuner.run_record.console_lines import FILE_ONLY
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction import redact
from astuner.system.redaction.output import redacted_output

if TYPE_CHECKING:
    from loguru import Message

_TRACEBACK_NOTE = "its traceback is in"
_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}
_WORD = re.compile(r"\s*\S+\s*")
_NUMBER = re.compile(r"[0-9]+")
_PRINTED_WARNINGS = 3


class _RobustConsole(Console):
    """A console that becomes silent if its output can no longer be written, so that a lost terminal ends no run."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print to the output; if that fails, become silent.

        With `soft_wrap`, a terminal gets lines that end between words, and words that are longer than a line unchanged,
        such as paths to copy. A file gets one line.
        """
        if settings.get("soft_wrap") and self.is_terminal:
            objects = tuple(
                _broken_between_words(self.render_str(part), self.width) if isinstance(part, str) else part
                for part in objects
            )
        try:
            super().print(*objects, **settings)
        except OSError:  # a full disk behind a redirection, or a closed terminal
            self.quiet = True

    def render_str(self, text: str, **settings: Any) -> Text:
        """Render text with control characters escaped, because tasks and models may contain any."""
        return super().render_str(escape_control_characters(text), **settings)

    def on_broken_pipe(self) -> None:
        """Become silent. Rich would exit the process."""
        self.quiet = True


def _broken_between_words(text: Text, width: int) -> Text:
    """Return a text whose lines have at most `width` columns, unless a word is longer. Rich would break the word."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        starts, column = [], 0
        for word in _WORD.finditer(line.plain):
            if column and column + cell_len(word[0].rstrip()) > width:
                starts.append(word.start())
                column = 0
            column += cell_len(word[0])
        pieces = line.divide(starts)
        for piece in pieces:
            piece.rstrip()  # a space in the column after the last one would make an empty line
        lines += pieces
    return Text("\n").join(lines)


def make_console(*, stderr: bool = True) -> Console:
    """Return a console. Runs use stderr, which leaves stdout to the output of commands."""
    return _RobustConsole(stderr=stderr, highlight=False)


_console_handler = 0  # loguru's default handler


def log_to_console(console: Console) -> None:
    """Send the log to the console, redacted; replaces the handler of an earlier run, but not the user's handlers.

    Warnings that differ only in numbers are printed three times, and then when their number reaches a power of two.
    """
    global _console_handler  # noqa: PLW0603

    repeated: Counter[str] = Counter()

    def write(message: Message) -> None:
        record = message.record
        times = ""
        if record["level"].name == "WARNING":
            key = _NUMBER.sub("#", record["message"])
            repeated[key] += 1
            number = repeated[key]
            if number > _PRINTED_WARNINGS:
                if number & (number - 1):
                    return
                times = f" ({number} such warnings so far; run.log has all)"
        style = _STYLES.get(record["level"].name, "")
        text = redact(f"{record['time']:HH:mm:ss} {record['message']}{times}")
        console.print(escape(text), style=style, soft_wrap=True)

    with contextlib.suppress(ValueError):  # the user has removed it
        logger.remove(_console_handler)
    _console_handler = logger.add(
        write, level="INFO", format="{message}", filter=lambda record: not record["extra"].keys() >= FILE_ONLY.keys()
    )


@contextlib.contextmanager
def filtered_output() -> Iterator[None]:
    """Hide the progress bars and log lines of libraries, send warnings to run.log, and redact what is printed."""
    with _quiet_transformers(), _quiet_hub(), _warnings_to_log(), redacted_output():
        yield


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    level, had_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_progress_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    # Its warnings are about retries; the error that follows the last retry is enough.
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def _warnings_to_log() -> Iterator[None]:
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


def print_error(error: BaseException) -> None:
    """Print the message of an expected error, redacted."""
    make_console().print(f"[bold red]error:[/] {escape(redact(str(error)))}", soft_wrap=True)


def add_traceback_note(error: BaseException, file: Path) -> None:
    """Note in the error which file has its traceback, for `print_internal_error`."""
    error.add_note(f"{_TRACEBACK_NOTE} {file}")


def print_internal_error(error: BaseException) -> None:
    """Print an unexpected error: its message, where it was raised, and the file with its traceback."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_TRACEBACK_NOTE)]
    if not notes:  # raised before there was a run record
        with tempfile.NamedTemporaryFile("w", prefix="astuner-", suffix=".log", delete=False) as file:
            file.write(redact("".join(traceback.format_exception(error))))
        notes = [f"{_TRACEBACK_NOTE} {file.name}"]
    text = f"{type(error).__name__}: {error} (at {raised_at(error)})\n{notes[0]}"
    make_console().print(
        f"[bold red]internal error:[/] {escape(redact(text))}; this is a bug in astuner: please report it with that "
        "file",
        soft_wrap=True,
    )

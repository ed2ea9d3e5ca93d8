"""What a run prints: its log beside progress bars, and how it ended."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from astuner.launcher.output import FILE_ONLY
from astuner.launcher.visible import visible
from astuner.plugin import raised_at
from astuner.run_record import RunSummary, ValidationSummary, read_metrics, redact

if TYPE_CHECKING:
    from loguru import Message, Record

_TRACEBACK = "its traceback is in"
_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}


class _SteadyConsole(Console):
    """A console that falls silent when nobody can read it any more; what happens to a terminal ends no run."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print, if that is possible."""
        try:
            super().print(*objects, **settings)
        except OSError:  # a full disk behind a redirection, a terminal that is gone
            self.quiet = True

    def render_str(self, text: str, **settings: Any) -> Text:
        """Make a text of `text` that does nothing to the terminal, whatever a task or a model wrote."""
        return super().render_str(visible(text), **settings)

    def on_broken_pipe(self) -> None:
        """Fall silent, where rich would end the process."""
        self.quiet = True


def make_console(*, stderr: bool = True) -> Console:
    """Return the console of a run: stderr, so that a command's output can be piped; stdout is for that output."""
    return _SteadyConsole(stderr=stderr, highlight=False)


class _Sinks:
    """The console sink in use, so that a later run replaces it and leaves the user's own sinks alone."""

    current = 0  # loguru's default sink


def log_to(console: Console) -> None:
    """Send the log to the console, above any progress bars and free of secrets."""

    def write(message: Message) -> None:
        record = message.record
        style = _STYLES.get(record["level"].name, "")
        text = redact(f"{record['time']:HH:mm:ss} {record['message']}")
        console.print(escape(text), style=style, soft_wrap=True)

    with contextlib.suppress(ValueError):  # removed by someone else
        logger.remove(_Sinks.current)
    _Sinks.current = logger.add(write, level="INFO", format="{message}", filter=_is_for_the_console)


def _is_for_the_console(record: Record) -> bool:
    return not record["extra"].keys() >= FILE_ONLY.keys()


def print_error(error: BaseException) -> None:
    """Print an error's message, free of secrets, without a traceback."""
    make_console().print(f"[bold red]error:[/] {escape(redact(str(error)))}", soft_wrap=True)


def note_traceback(error: BaseException, file: Path) -> None:
    """Let `print_unexpected` know which file has the error's traceback."""
    error.add_note(f"{_TRACEBACK} {file}")


def print_unexpected(error: BaseException) -> None:
    """Print an error that nobody foresaw: what, where, and the file that has its traceback."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_TRACEBACK)]
    place = notes[0] if notes else f"{_TRACEBACK} {_keep_traceback(error)}"
    text = f"{type(error).__name__}: {error} (at {raised_at(error)})\n{place}"
    make_console().print(
        f"[bold red]internal error:[/] {escape(redact(text))}; this should not happen: please report it with that file",
        soft_wrap=True,
    )


def _keep_traceback(error: BaseException) -> Path:
    """Write the traceback of an error that came before there was a run record to a file, and return the file."""
    with tempfile.NamedTemporaryFile("w", prefix="astuner-", suffix=".log", delete=False) as file:
        file.write(redact("".join(traceback.format_exception(error))))
    return Path(file.name)


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: validation, rewards by step, tokens, time, and where everything is."""
    if summary.validation.before or summary.validation.after:
        console.print(_validation_table(summary))
    rewards = [row.metrics["reward/mean"] for row in read_metrics(folder) if row.metrics.get("reward/mean") is not None]
    if rewards:
        console.print("reward per step: " + " ".join(f"{reward:.2f}" for reward in rewards), soft_wrap=True)
    if summary.steps:
        _print_steps(console, summary)
    if summary.model:
        console.print(escape(f"model: {summary.model}"), soft_wrap=True)
    console.print(escape(f"record: {folder}"), soft_wrap=True)


def _print_steps(console: Console, summary: RunSummary) -> None:
    tokens, episodes = summary.tokens, summary.episodes
    if episodes.ok + episodes.failed + episodes.dropped:
        console.print(
            f"episodes: {episodes.ok} ok, {episodes.failed} failed, {episodes.dropped} dropped; "
            f"tokens: {tokens.raw:,} raw, {tokens.distinct:,} distinct, {tokens.trained:,} trained",
            soft_wrap=True,
        )
    first = summary.first_reward_seconds
    console.print(
        f"time: {summary.seconds:.0f} s for {summary.steps} steps"
        + (f", first reward after {first:.1f} s" if first is not None else ""),
        soft_wrap=True,
    )


def _validation_table(summary: RunSummary) -> Table:
    table = Table(title="validation", title_justify="left")
    for name in ("", "success", "reward", "episodes"):
        table.add_column(name, justify="right" if name else "left")
    measured = {"before": summary.validation.before, "after": summary.validation.after}
    if not summary.steps:
        measured = {"this model": summary.validation.after}
    for name, entry in measured.items():
        table.add_row(name, *_cells(entry))
    return table


def _cells(entry: ValidationSummary | None) -> tuple[str, str, str]:
    if entry is None or entry.success_rate is None or entry.reward is None:
        return "-", "-", "-"
    return f"{entry.success_rate:.1%}", f"{entry.reward:.3f}", str(entry.episodes)

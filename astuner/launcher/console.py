"""Terminal output without secrets, control characters or library noise: log lines, errors and tables."""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from astuner.backbone.base import RunContext
from astuner.errors import BackboneError
from astuner.plugin import raised_at
from astuner.run_record.console_lines import FILE_ONLY
from astuner.schema import Episode, Split
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction.output import redacted_output
from astuner.system.redaction.redactor import redact
from astuner.task_rollout.rollout import describe_failures
from astuner.task_rollout.statistics import scored, tokens_of
from astuner.task_rollout.tool_use import ToolUse
from astuner.viewer.transcripts import DEFAULT_SHOWN, Shown, print_transcripts

if TYPE_CHECKING:
    from loguru import Message

_TRACEBACK_NOTE = "its traceback is in"
_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}
_WORD = re.compile(r"\s*\S+\s*")
_NUMBER = re.compile(r"[0-9]+")
_PRINTED_WARNINGS = 3
# Width of the widest table in a file, in columns.
_WIDEST = 500


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
    with _quiet_libraries(), _warnings_to_log(), redacted_output():
        yield


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    # The hub's warnings are about retries; the error that follows the last retry is enough.
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    levels = hub.get_verbosity(), transformers.get_verbosity()
    had_progress_bars = transformers.is_progress_bar_enabled()
    hub.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    try:
        yield
    finally:
        hub.set_verbosity(levels[0])
        transformers.set_verbosity(levels[1])
        if had_progress_bars:
            transformers.enable_progress_bar()


@contextlib.contextmanager
def _warnings_to_log() -> Iterator[None]:
    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
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


def episode_table(title: str, episodes: Sequence[Episode]) -> Table:
    """Return a table with one row per episode. A narrow terminal truncates the task's text, never a number.

    The column of tool calls is there if an episode offers tools.
    """
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("task")
    uses = [ToolUse.of(episode) for episode in episodes]
    tools = ("tools",) if any(use.is_offered for use in uses) else ()
    for name in ("reward", "success", "calls", *tools, "tokens", "samples", "forks", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for episode, use in zip(episodes, uses, strict=True):
        task = escape_control_characters(episode.task.main_query[:40]).replace("\n", "␊").replace("\t", "␉")
        table.add_row(
            Text(task, no_wrap=True, overflow="ellipsis"),
            "-" if episode.reward is None else f"{episode.reward:.2f}",
            "-" if episode.is_success is None else ("yes" if episode.is_success else "no"),
            str(len(episode.calls)),
            *((f"{use.calls} ({use.failed} failed)" if use.failed else str(use.calls),) if tools else ()),
            str(tokens_of([episode]).raw),
            str(len(episode.samples)),
            str(sum(call.fork is not None for call in episode.calls)),
            f"{episode.end_time - episode.start_time:.2f}",
        )
    return table


def describe_training_use(episodes: Sequence[Episode]) -> list[str]:
    """Return lines that say which episodes, samples and tokens a training step would use."""
    usable = [episode for episode in episodes if episode.status == "ok"]
    if not usable:
        failed = sum(episode.status == "failed" for episode in episodes)
        return [f"a training step would have nothing to train: {failed} of {len(episodes)} episodes failed"]
    groups: dict[str, set[float | None]] = {}
    for episode in usable:
        groups.setdefault(episode.task.task_id, set()).add(episode.reward)
    tokens, samples = tokens_of(usable), [sample for episode in usable for sample in episode.samples]
    with_signal = sum(len(rewards) > 1 for rewards in groups.values())
    return [
        f"a training step would use {len(usable)} of {len(episodes)} episodes: {len(samples)} samples with "
        f"{sum(len(sample.token_ids) for sample in samples)} tokens, {tokens.trained} of them trained",
        f"rewards differ within {with_signal} of {len(groups)} tasks; group-relative algorithms such as GRPO learn "
        "only from those",
    ]


def explain_no_training(episodes: Sequence[Episode]) -> str | None:
    """Return why no episode can be trained on; None if one can, or if none was dropped."""
    if any(episode.status == "ok" for episode in episodes):
        return None
    dropped = next((episode for episode in episodes if episode.status == "dropped"), None)
    if dropped is None:
        return None
    return f"none of the {len(episodes)} episodes can be trained on. The first: [{dropped.error_kind}] {dropped.error}"


def check_rewards(episodes: Sequence[Episode]) -> None:
    """Raise BackboneError, with the first episode's error, if no episode has a reward."""
    if not scored(episodes):
        reason = f". The first: [{episodes[0].error_kind}] {episodes[0].error}" if episodes else ""
        raise BackboneError(f"no episode has a reward ({len(episodes)} were run){reason}")


def print_episodes(
    context: RunContext, episodes: Sequence[Episode], title: str, split: Split, shown: Shown | None
) -> None:
    """Print a debug run's transcripts (None: the default number of them), table and failures."""
    console = context.progress.console
    print_transcripts(console, episodes, DEFAULT_SHOWN if shown is None else shown)
    console.print(episode_table(title, episodes))
    for line in describe_failures(episodes):
        console.print(escape(redact(f"failed: {line}")), style="yellow", soft_wrap=True)
    if split == "train":
        for line in describe_training_use(episodes):
            console.print(line, soft_wrap=True)
        if (reason := explain_no_training(episodes)) is not None:
            console.print(escape(redact(reason)), style="yellow", soft_wrap=True)
    folder = str(context.record.folder)
    console.print(escape(f"record: {folder} (to browse it: astuner view {shlex.quote(folder)})"), soft_wrap=True)


def plain_table(*numeric_columns: str) -> Table:
    """Return a table without lines, which begins with right-aligned columns."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in numeric_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def facts_table() -> Table:
    """Return a table of facts: a bold name and a text."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table. In a file or a pipe, it is as wide as its content, because such a console has no width."""
    if not console.is_terminal:
        content = Measurement.get(console, console.options.update(width=_WIDEST), table)
        console.width = max(console.width, content.maximum)
    console.print(table)

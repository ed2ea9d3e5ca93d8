"""What a run prints: its log beside progress bars, and how it ended."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.run_record import RunSummary, ValidationSummary, read_metrics, redact

if TYPE_CHECKING:
    from pathlib import Path

    from loguru import Message

_STYLES = {"WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red", "DEBUG": "dim"}


def make_console() -> Console:
    """Return the console of a run: stderr, so that a command's output can be piped."""
    return Console(stderr=True, highlight=False)


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
    _Sinks.current = logger.add(write, level="INFO", format="{message}")


def print_error(error: BaseException) -> None:
    """Print an error's message, free of secrets, without a traceback."""
    make_console().print(f"[bold red]error:[/] {escape(redact(str(error)))}", soft_wrap=True)


def print_summary(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print how a run ended: validation, rewards by step, tokens, time, and where everything is."""
    if summary.validation.before or summary.validation.after:
        console.print(_validation_table(summary))
    rewards = [row.metrics["reward/mean"] for row in read_metrics(folder) if row.metrics.get("reward/mean") is not None]
    if rewards:
        console.print("reward per step: " + " ".join(f"{reward:.2f}" for reward in rewards), soft_wrap=True)
    tokens, episodes = summary.tokens, summary.episodes
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
    if summary.model:
        console.print(f"model: {summary.model}", soft_wrap=True)
    console.print(f"record: {folder}", soft_wrap=True)


def _validation_table(summary: RunSummary) -> Table:
    table = Table(title="validation", title_justify="left")
    for name in ("", "success", "reward", "episodes"):
        table.add_column(name, justify="right" if name else "left")
    for name, entry in (("before", summary.validation.before), ("after", summary.validation.after)):
        table.add_row(name, *_cells(entry))
    return table


def _cells(entry: ValidationSummary | None) -> tuple[str, str, str]:
    if entry is None or entry.success_rate is None or entry.reward is None:
        return "-", "-", "-"
    return f"{entry.success_rate:.1%}", f"{entry.reward:.3f}", str(entry.episodes)

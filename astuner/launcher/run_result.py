"""The end of a run on the terminal: one task before and after, whether the model learned, and the totals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.errors import RecordError
from astuner.run_record.console_lines import FILE_ONLY
from astuner.run_record.episode_file import read_episode
from astuner.run_record.episodes import EpisodeEntry, read_index
from astuner.run_record.metrics import read_metrics
from astuner.run_record.summary import RunSummary
from astuner.run_record.verdict import run_verdict
from astuner.system.redaction.redactor import redact
from astuner.viewer.transcripts import EpisodeTranscript

_MIN_WIDTH_OF_COLUMNS = 76


def print_result(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print the results of a run: a task before and after, the verdict, the totals, and the folders."""
    rows = read_metrics(folder, lambda error: logger.debug("skipped: {}", error))
    if summary.steps:
        _print_before_and_after(console, folder)
    verdict = run_verdict(summary, rows)
    for line in (*verdict.lines, *(f"  - {text}" for text in verdict.suggestions)):
        console.print(escape(line), soft_wrap=True)
        logger.bind(**FILE_ONLY).info("{}", line)
    if summary.steps:
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
    if summary.model:
        console.print(escape(f"model: {summary.model}"), soft_wrap=True)
    console.print(escape(f"record: {folder}"), soft_wrap=True)


def _print_before_and_after(console: Console, folder: Path) -> None:
    try:
        chosen = choose_task(read_index(folder))
        if chosen is None:
            return
        first, last = (read_episode(folder / entry.path) for entry in chosen)
    except RecordError as error:
        logger.debug("no transcripts: {}", error)
        return
    before = EpisodeTranscript("before", first)
    after = EpisodeTranscript(f"after step {chosen[1].step}", last)
    console.print(escape(redact(f"a validation task: {first.task.main_query[:200]!r}")), soft_wrap=True)
    if console.width < _MIN_WIDTH_OF_COLUMNS:
        console.print(before, after)
        return
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(before, after)
    console.print(table)


def choose_task(entries: Sequence[EpisodeEntry]) -> tuple[EpisodeEntry, EpisodeEntry] | None:
    """Return the episodes of a validation task in the first and the last validation; None without both.

    A task that was solved only at the end is preferred, then one whose reward rose most.
    """
    validation = [entry for entry in entries if entry.split == "val" and entry.reward is not None]
    if not validation:
        return None
    last_step = max(entry.step for entry in validation)
    first = {(entry.task_id, entry.repeat_index): entry for entry in validation if entry.step == 0}
    pairs = [
        (first[key], entry)
        for entry in validation
        if entry.step == last_step > 0 and (key := (entry.task_id, entry.repeat_index)) in first
    ]

    def gain(pair: tuple[EpisodeEntry, EpisodeEntry]) -> tuple[bool, float]:
        before, after = pair
        return bool(after.is_success) and not before.is_success, (after.reward or 0.0) - (before.reward or 0.0)

    return max(pairs, key=gain, default=None)

"""The end of a run on the terminal: one task before and after, whether the model learned, and the totals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from loguru import logger
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.errors import RecordError
from astuner.launcher.transcripts import EpisodeTranscript
from astuner.redaction import redact
from astuner.run_record import (
    FILE_ONLY,
    EpisodeEntry,
    MetricsRow,
    RunSummary,
    ValidationSummary,
    difference_interval,
    read_episode,
    read_index,
    read_metrics,
    success_interval,
)

_FEW_EPISODES = 50
_FEW_STEPS = 20
_TINY_KL = 1e-6
_MIN_WIDTH_OF_COLUMNS = 76


def print_result(console: Console, summary: RunSummary, folder: Path) -> None:
    """Print the results of a run: a task before and after, the verdict, the totals, and the folders.

    Args:
        console: the terminal.
        summary: the run's summary.
        folder: the folder of its record.
    """
    rows = read_metrics(folder, lambda error: logger.debug("skipped: {}", error))
    if summary.steps:
        _print_before_and_after(console, folder)
    for line in describe_result(summary, rows):
        console.print(escape(line), soft_wrap=True)
        logger.bind(**FILE_ONLY).info("{}", line)
    if summary.steps:
        _print_totals(console, summary)
    if summary.model:
        console.print(escape(f"model: {summary.model}"), soft_wrap=True)
    console.print(escape(f"record: {folder}"), soft_wrap=True)


def describe_result(summary: RunSummary, rows: Sequence[MetricsRow]) -> list[str]:
    """Return lines that say whether the model learned, with which certainty, and which keys to change if it did not.

    Args:
        summary: the run's summary.
        rows: the run's metrics.
    """
    before, after = summary.validation.before, summary.validation.after
    lines = []
    if not summary.steps:
        return [f"success {_rate_text(after)}; reward {after.reward:.3f}"] if after and after.reward is not None else []
    learned = None
    if before and after and before.success_rate is not None and after.success_rate is not None:
        learned, line = _verdict(before, after)
        lines.append(line)
    elif after and after.success_rate is not None:
        lines.append(
            f"success at the end: {_rate_text(after)}. The starting model was not measured (val_before_train: False)"
        )
    rewards = [reward for row in rows if (reward := row.metrics.get("reward/mean")) is not None]
    if len(rewards) > 1:
        quarter = max(len(rewards) // 4, 1)
        first, last = math.fsum(rewards[:quarter]) / quarter, math.fsum(rewards[-quarter:]) / quarter
        lines.append(f"training reward {first:.2f} → {last:.2f} (means of the first and last {_steps(quarter)})")
    lines += _notes(rows)
    if learned is False:
        lines += [f"  - {text}" for text in _suggestions(summary, rows)]
    return lines


def _verdict(before: ValidationSummary, after: ValidationSummary) -> tuple[bool, str]:
    """Return whether success rose beyond noise, and a line that says so."""
    rates = before.success_rate or 0.0, after.success_rate or 0.0
    low, high = difference_interval(rates[0], before.episodes, rates[1], after.episodes)
    change = f"{100 * (rates[1] - rates[0]):+.0f} points, 95% interval {100 * low:+.0f} to {100 * high:+.0f}"
    if low > 0:
        text = "it learned"
    elif high < 0:
        text = "it got worse"
    else:
        text = "no clear change"
    return low > 0, f"{text}: success {_rate_text(before)} → {_rate_text(after)} ({change})"


def _rate_text(entry: ValidationSummary) -> str:
    if entry.success_rate is None:
        return "unknown"
    low, high = success_interval(entry.success_rate, max(entry.episodes, 1))
    margin = max(high - entry.success_rate, entry.success_rate - low)  # the interval is not symmetric
    return f"{entry.success_rate:.1%} ± {100 * margin:.0f} on {entry.episodes} episodes"


def _notes(rows: Sequence[MetricsRow]) -> list[str]:
    """Return a line about the distance from the starting model, and one about steps without a learning signal."""
    lines = []
    distances = [distance for row in rows if (distance := row.metrics.get("loss/kl")) is not None]
    if distances:
        lines.append(f"KL to the starting model: {distances[-1]:.3g} nats per token")
    steps, without = _signal_counts(rows)
    if without:
        lines.append(
            f"{without} of {_steps(steps)} had nothing to learn from: all episodes of each task had equal rewards"
        )
    return lines


def _signal_counts(rows: Sequence[MetricsRow]) -> tuple[int, int]:
    """Return the number of training steps, and of those without a learning signal."""
    steps = [row.metrics for row in rows if "episodes/total" in row.metrics]
    return len(steps), sum(metrics.get("update/groups_without_variance", 1.0) == 1.0 for metrics in steps)


def _suggestions(summary: RunSummary, rows: Sequence[MetricsRow]) -> list[str]:
    """Return possible reasons that the model did not learn, with the keys to change."""
    before = summary.validation.before
    texts: list[str] = []
    steps, without = _signal_counts(rows)
    if before is not None and (before.success_rate or 0.0) > 0.95:
        texts.append("the starting model already solves the validation tasks; use harder tasks")
    if steps and without > steps / 2:
        texts.append(
            "most steps had nothing to learn from; use easier or harder tasks, more rollout.num_repeat, a higher "
            "rollout.temperature, or a reward with more than two values"
        )
    changes = [change for row in rows if (change := row.metrics.get("kl/update")) is not None]
    if changes and max(changes) < _TINY_KL:
        texts.append("the updates hardly changed the model (kl/update); raise trainer_common.optim.lr")
    if steps and steps < _FEW_STEPS:
        texts.append(f"the run had {_steps(steps)}; raise trainer_common.total_training_steps")
    if before is not None and before.episodes < _FEW_EPISODES:
        texts.append(
            f"a validation has {before.episodes} episodes, so small changes cannot be seen; add validation tasks or "
            "raise rollout.val_kwargs.num_repeat"
        )
    return texts


def _steps(number: int) -> str:
    return f"{number} step" + ("" if number == 1 else "s")


def _print_before_and_after(console: Console, folder: Path) -> None:
    """Print the transcripts of one validation task, before and after training, side by side."""
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


def _print_totals(console: Console, summary: RunSummary) -> None:
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

"""A run's account for people."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from astuner.launcher.explain.account import Account, total
from astuner.launcher.explain.run import CertificateAccount, RunExplanation

_MOST_ROWS = 20
_MOST_FORKED = 5


def print_run(console: Console, run: RunExplanation) -> None:
    """Print a run's account."""
    what = "training" if run.split == "train" else "validation"
    console.print(f"[bold]{escape(run.run)}[/], {what} episodes of {_counted(len(run.steps), 'step')}", soft_wrap=True)
    console.print()
    _print_totals(console, run)
    if len(run.steps) > 1:
        console.print()
        console.print(_steps_table(run.steps))
    if run.forked:
        console.print()
        console.print(_forked_table(run))
        command = shlex.join(["astuner", "explain", run.run, run.forked[0].episode_id])
        console.print(escape(f"one in detail: {command}"), soft_wrap=True)
    print_fixes(console, run.fixes)


def print_fixes(console: Console, fixes: Mapping[str, str]) -> None:
    """Print what to try, cause by cause."""
    if not fixes:
        return
    console.print()
    console.print("[bold]what to try[/]")
    for cause, fix in fixes.items():
        console.print(f"  [yellow]{escape(cause)}[/]")
        console.print(Padding(escape(fix), (0, 0, 0, 4)))


def line_of_tokens(raw: int, distinct: int | None, trained: int, saving: float | None) -> str:
    """Return tokens from raw to trained, in words."""
    if distinct is None or saving is None:
        return f"{raw:,} raw → {trained:,} trained"
    return f"{raw:,} raw → {distinct:,} distinct → {trained:,} trained, saving {saving:.1f}×"


def line_of_forks(forks: Mapping[str, int]) -> str:
    """Return forks by cause, in words."""
    return ", ".join(f"{count:,} {cause}" for cause, count in forks.items())


def _print_totals(console: Console, run: RunExplanation) -> None:
    account = run.total
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column()
    reward = "" if account.reward is None else f"; mean reward {account.reward:.3f}"
    lines.add_row("episodes", f"{account.ok:,} ok, {account.failed:,} failed, {account.dropped:,} dropped{reward}")
    left_out = f" ({account.dropped_samples:,} more left out)" if account.dropped_samples else ""
    lines.add_row("calls", f"{_counted(account.calls, 'call')} → {_counted(account.samples, 'sample')}{left_out}")
    lines.add_row(
        "tokens", line_of_tokens(account.tokens_raw, account.tokens_distinct, account.tokens_trained, account.saving)
    )
    lines.add_row("forks", line_of_forks(account.forks) or "none")
    lines.add_row("certificate", _certificate(run.certificate))
    console.print(lines)


def _certificate(account: CertificateAccount | None) -> str:
    if account is None:
        return "not asked for"
    if account.share is None:
        said = "nothing to check"
    else:
        style = "green" if account.share == 1.0 else "red"
        checked = f"{_counted(account.calls, 'trained call')} of {_counted(account.episodes, 'trained episode')}"
        rebuilt = "rebuilt exactly" if account.share == 1.0 else "checked; not rebuilt: " + ", ".join(account.inexact)
        # Cut, not rounded: nothing but all of them is 100%.
        said = f"[{style}]{math.floor(account.share * 1000) / 10:g}%[/]: {escape(f'{checked} {rebuilt}')}"
    if account.withheld:
        said += f"; {account.withheld:,} not checked: their token ids are withheld, as they spell a secret"
    if account.limited:
        said += f"; {account.limited:,} not checked: they lost samples to max_sample_per_task"
    return said


def _steps_table(steps: Mapping[int, Account]) -> Table:
    """One row a step, or for a long run one for several."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("step", "reward", "ok", "lost", "calls", "samples", "raw", "distinct", "trained", "saving", "forks"):
        table.add_column(name, justify="right", no_wrap=True)
    numbers = list(steps)
    size = math.ceil(len(numbers) / _MOST_ROWS)
    for first in range(0, len(numbers), size):
        rows = numbers[first : first + size]
        account = total([steps[number] for number in rows])
        table.add_row(
            str(rows[0]) if len(rows) == 1 else f"{rows[0]}–{rows[-1]}",
            "–" if account.reward is None else f"{account.reward:.2f}",
            f"{account.ok:,}",
            f"{account.failed + account.dropped:,}",
            _short(account.calls),
            _short(account.samples),
            _short(account.tokens_raw),
            "–" if account.tokens_distinct is None else _short(account.tokens_distinct),
            _short(account.tokens_trained),
            "–" if account.saving is None else f"{account.saving:.1f}×",
            f"{sum(account.forks.values()):,}",
        )
    return table


def _forked_table(run: RunExplanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("episodes with most forks", overflow="fold")
    table.add_column("forks", overflow="fold")
    for episode in run.forked[:_MOST_FORKED]:
        table.add_row(escape(episode.episode_id), escape(line_of_forks(episode.forks)))
    return table


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _short(count: int) -> str:
    """Return a number in at most 6 characters, so that a row fits 80 columns."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1000:,.0f}k" if count < 10_000_000 else f"{count / 1_000_000:,.0f}M"

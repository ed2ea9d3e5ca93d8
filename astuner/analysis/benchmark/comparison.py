"""`astuner bench compare`: which results differ beyond noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.markup import escape

from astuner.analysis.benchmark.results import BenchResult, changed_versions
from astuner.analysis.benchmark.statistics import Difference, Measurements, compare_measurements, holm
from astuner.errors import RecordError
from astuner.launcher.console import plain_table, print_table

Verdict = Literal["worse", "better", "equal"]
Measure = Literal["success after", "mean of the curve"]

_STYLES: dict[Verdict, str] = {"worse": "bold red", "better": "green", "equal": ""}
_WORDS: dict[Verdict, str] = {"worse": "worse", "better": "better", "equal": "no difference beyond noise"}


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """One measure, compared between two results for the same entry.

    Attributes:
        name: entry and backbone; both backbones if they differ.
        measure: success after training, or the mean height of the validation curve.
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


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """The comparison of results B with results A.

    Attributes:
        rows: the compared measures.
        missing: a line for each entry of which only A has a result, and for each entry whose seeds failed only in B.
        notes: a line for each measure or entry that could not be compared, and for each difference between the two
            sides in commands, starting models and versions.
    """

    rows: tuple[ResultComparison, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_regression(self) -> bool:
        """Whether a measure of B is worse, or `missing` has lines."""
        return bool(self.missing) or any(row.verdict == "worse" for row in self.rows)


@dataclass(slots=True)
class _Pairs:
    """The comparable result pairs, by name, and the lines of `BenchComparison`."""

    pairs: list[tuple[str, BenchResult, BenchResult]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_results(
    a: Sequence[BenchResult],
    b: Sequence[BenchResult],
    level: float = 0.01,
    tolerance: float = 0.01,
    until: int | None = None,
    *,
    common_seeds: bool = False,
) -> BenchComparison:
    """Compare results B with results A, entry by entry.

    Results of the same entry and backbone are compared. If A and B each contain one backbone, and the
    backbones differ, the two backbones are compared.

    Args:
        a, b: the results. Each side has an entry and backbone once.
        level: if all results are equal, the probability of at least one false `worse` is at most this.
        tolerance: a smaller difference of the means is never `worse` or `better`.
        until: compare the first steps only, as in `BenchResult.until`; None for all steps.
        common_seeds: compare only the seeds that both sides have, so that the test is paired.

    Raises:
        RecordError: If nothing can be compared.
    """
    found = _pairs(a, b)
    tests: list[tuple[str, Measure, float, float, Difference]] = []
    for name, *sides in found.pairs:
        try:
            first, second = _chosen_parts(sides, until, common_seeds=common_seeds)
        except RecordError as error:
            lines = found.missing if isinstance(error, _LackingError) else found.notes
            lines.append(f"{name} is not compared: {error}")
            continue
        for measure in ("success after", "mean of the curve"):
            values = _comparable(measure, first, second)
            if isinstance(values, str):
                found.notes.append(f"{name}: the {measure} is not compared, because {values}")
            elif values is not None:
                means = [sum(part.values.values()) / len(part.values) for part in values[:2]]
                tests.append((name, measure, means[0], means[1], values[2]))
    if not tests:
        raise RecordError("\n  ".join(["there is nothing to compare:", *found.missing, *found.notes]))
    return BenchComparison(tuple(_verdicts(tests, level, tolerance)), tuple(found.missing), tuple(found.notes))


def _verdicts(
    tests: Sequence[tuple[str, Measure, float, float, Difference]], level: float, tolerance: float
) -> Iterator[ResultComparison]:
    worse = holm([difference.p_worse for *_, difference in tests])
    better = holm([difference.p_better for *_, difference in tests])
    for (name, measure, mean_a, mean_b, difference), p_worse, p_better in zip(tests, worse, better, strict=True):
        beyond = abs(difference.difference) >= tolerance
        verdict: Verdict = "equal"
        if beyond and p_worse <= level:
            verdict = "worse"
        elif beyond and p_better <= level:
            verdict = "better"
        yield ResultComparison(name, measure, mean_a, mean_b, difference, p_worse, p_better, verdict)


def _pairs(a: Sequence[BenchResult], b: Sequence[BenchResult]) -> _Pairs:
    backbones = [{result.backbone for result in side} for side in (a, b)]
    across = len(backbones[0]) == len(backbones[1]) == 1 and backbones[0] != backbones[1]

    def key(result: BenchResult) -> str:
        return result.suite if across else result.name

    sides = [{key(result): result for result in side} for side in (a, b)]
    found = _Pairs()
    for name in sorted(sides[0].keys() | sides[1].keys()):
        if name not in sides[0]:
            found.notes.append(f"{name}: only in B")
        elif name not in sides[1]:
            found.missing.append(f"B has no result of {name}")
        else:
            first, second = sides[0][name], sides[1][name]
            found.pairs.append((f"{name}, {first.backbone} and {second.backbone}" if across else name, first, second))
            if failed := sorted({*second.failed_seeds} - {*first.failed_seeds}):
                found.missing.append(f"{_seeds(failed)} of B failed in {name}")
            if first.failed_seeds:
                found.notes.append(f"{name}: {_seeds(first.failed_seeds)} of A failed")
            if first.backbone == second.backbone and first.command != second.command:
                commands = f"\n  A: {first.command}\n  B: {second.command}"
                found.notes.append(f"{name}: the commands differ:{commands}")
            if first.model != second.model:
                found.notes.append(f"{name}: the starting model of A is {first.model}, that of B {second.model}")
            if changed := changed_versions(first.versions, second.versions):
                found.notes.append(f"{name}: versions, A → B: {', '.join(changed)}")
    return found


class _LackingError(RecordError):
    """B lacks steps that A has."""


def _seeds(numbers: Sequence[int]) -> str:
    return f"{'seed' if len(numbers) == 1 else 'seeds'} {', '.join(map(str, numbers))}"


def _chosen_parts(
    sides: Sequence[BenchResult], until: int | None, *, common_seeds: bool
) -> tuple[BenchResult, BenchResult]:
    """Return the compared steps and seeds of two results; `RecordError` if there are none."""
    first, second = sides
    if common_seeds:
        numbers = {seed.seed for seed in first.seeds} & {seed.seed for seed in second.seeds}
        if not numbers:
            raise RecordError("A and B have no common seed; run both with the same seeds")
        first, second = first.of_seeds(numbers), second.of_seeds(numbers)
    if until is None:
        return first, second
    first = first.until(until)
    try:
        return first, second.until(until)
    except RecordError as error:
        raise _LackingError(f"in B, {error}") from error


def _comparable(
    measure: Measure, a: BenchResult, b: BenchResult
) -> tuple[Measurements, Measurements, Difference] | str | None:
    """Return a measure of two results and its difference, or why it cannot be compared; None if neither has it."""
    if measure == "mean of the curve":
        has_curve = [any(seed.curve_mean is not None for seed in side.seeds) for side in (a, b)]
        if not any(has_curve):
            return None
        if not all(has_curve):
            return f"{'B' if has_curve[0] else 'A'} has no validation during training"
        if len({tuple(step for step, _ in seed.curve) for side in (a, b) for seed in side.seeds}) > 1:
            return "the validations are at different steps"
    values = [_measurements(side, measure) for side in (a, b)]
    difference = compare_measurements(values[0], values[1])
    if difference is None:
        return "a side has one seed; two or more are needed"
    return values[0], values[1], difference


def _measurements(result: BenchResult, measure: Measure) -> Measurements:
    """Return a measure by seed with the variance that its validation episodes give it."""
    if measure == "success after":
        values = {seed.seed: seed.after for seed in result.seeds}
        variances = [_variance(seed.after, seed.episodes) for seed in result.seeds]
    else:
        values = {seed.seed: mean for seed in result.seeds if (mean := seed.curve_mean) is not None}
        variances = [
            sum(_variance(rate, seed.episodes) for _, rate in seed.curve) / len(seed.curve) ** 2
            for seed in result.seeds
        ]
    return Measurements(values, sum(variances) / len(variances))


def _variance(rate: float, episodes: int | None) -> float:
    """Return the variance of a success rate over independent episodes, with the rate (k + 1) / (n + 2).

    It is 0 if the number of episodes is not known.
    """
    if not episodes:
        return 0.0
    # The rate k / n would give a variance of zero if all or no episodes succeeded.
    smoothed = (rate * episodes + 1) / (episodes + 2)
    return smoothed * (1 - smoothed) / episodes


def print_comparison(console: Console, comparison: BenchComparison) -> None:
    """Print a comparison as a table, the notes, and the verdict."""
    table = plain_table()
    table.add_column("entry", overflow="fold")
    table.add_column("measure", no_wrap=True)
    for name in ("A", "B", "difference", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in comparison.rows:
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
    for note in comparison.notes:
        console.print(escape(note), style="yellow", soft_wrap=True)
    worse = [f"{row.name} ({row.measure})" for row in comparison.rows if row.verdict == "worse"]
    regressions = [*([f"B is worse than A in {', '.join(worse)}"] if worse else []), *comparison.missing]
    console.print(
        escape(f"regression: {'; '.join(regressions)}" if regressions else "no regression of B beyond noise"),
        soft_wrap=True,
    )

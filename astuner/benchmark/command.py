"""The command `astuner bench SUITE.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from astuner.benchmark.report import draw_curves, draw_results, print_results
from astuner.benchmark.results import BenchResult, result_of, write_result
from astuner.benchmark.results_page import results_page
from astuner.benchmark.running import RunOutcome, plan_runs, run_suite
from astuner.benchmark.suite import load_suite
from astuner.launcher.console import log_to_console, make_console
from astuner.launcher.launch import DEFAULT_EXP_DIR
from astuner.run_record.files import write_atomically


def bench_suite(
    suite_file: Path,
    output: Path | None,
    jobs: int,
    *,
    seeds: int | None,
    backbones: Sequence[str],
    entries: Sequence[str],
    overrides: Sequence[str],
) -> int:
    """Run a suite; write the results, a page and its pictures into `output`, and print the table on stdout.

    The records and the page `results.md` lie in `output` itself, the result files in `results/` and the pictures in
    `plots/`.

    Args:
        suite_file: the YAML file of the suite.
        output: the folder; None for `launcher_record/bench_NAME`.
        jobs: number of runs at a time.
        seeds, backbones, entries, overrides: as in `plan_runs`.

    Returns:
        The exit code: 1 if a run failed, otherwise 0.

    Raises:
        ConfigError: the suite or a configuration is invalid.
        RecordError: a result, the page or a picture cannot be written.
    """
    console = make_console()
    log_to_console(console)
    suite = load_suite(suite_file)
    folder = output or Path(DEFAULT_EXP_DIR) / f"bench_{suite.name}"
    runs = plan_runs(suite, folder, seeds=seeds, backbones=backbones, entries=entries, overrides=overrides)

    def report(line: str) -> None:
        console.print(escape(line), soft_wrap=True)

    outcomes = run_suite(runs, jobs, report)
    results = _results(outcomes)
    for result in results:
        write_result(folder / "results", result)
        draw_curves(folder / "plots" / f"{result.name}.png", result)
    if results:
        draw_results(folder / "plots" / "gains.png", results)
        print_results(make_console(stderr=False), results)
        write_atomically(folder / "results.md", results_page(results, "plots").encode())
        report(f"results: {folder / 'results'}, page: {folder / 'results.md'}, records: astuner view {folder}")
    failed = [outcome for outcome in outcomes if outcome.result is None]
    for outcome in failed:
        console.print(escape(f"{outcome.run.name} failed: {outcome.failure}"), style="bold red", soft_wrap=True)
    return int(bool(failed))


def _results(outcomes: Sequence[RunOutcome]) -> list[BenchResult]:
    """Return the result of each entry and backbone with a finished run."""
    groups: dict[tuple[str, str], list[RunOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.run.entry.name, outcome.run.backbone), []).append(outcome)
    results = []
    for (_, backbone), group in groups.items():
        records = {outcome.run.seed: outcome.run.folder for outcome in group if outcome.result is not None}
        failed = [outcome.run.seed for outcome in group if outcome.result is None]
        result = result_of(group[0].run.entry, backbone, records, failed)
        if result is not None:
            results.append(result)
    return results

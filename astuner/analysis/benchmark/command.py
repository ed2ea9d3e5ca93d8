"""The command `astuner bench SUITE.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape

from astuner.analysis.benchmark.report import draw_curves, draw_results, print_results, results_page
from astuner.analysis.benchmark.results import BenchResult, read_results, result_of, write_result
from astuner.analysis.benchmark.running import RunOutcome, plan_runs, run_suite
from astuner.analysis.benchmark.suite import load_suite
from astuner.errors import RecordError
from astuner.launcher.console import log_to_console, make_console
from astuner.launcher.launch import DEFAULT_EXP_DIR
from astuner.run_record.files import write_atomically
from astuner.run_record.folder import FolderLock


def bench_suite(
    suite_file: Path,
    output: Path | None,
    jobs: int,
    *,
    seeds: int | None,
    backbones: Sequence[str],
    entries: Sequence[str],
    overrides: Sequence[str],
    rerun_outdated: bool = False,
) -> int:
    """Run a suite; write the results, a page and its pictures into `output`, and print the table on stdout.

    The records and the page `results.md` lie in `output` itself, the result files in `results/` and the pictures in
    `plots/`. The page contains all results in `output`, the table only the runs' results.

    For the arguments, see the command. The exit code is returned: 1 if a run failed, otherwise 0.

    Raises:
        ConfigError: the suite or a configuration is invalid.
        RecordError: another process runs a suite in `output`, or a result, the page or a picture cannot be written.
    """
    console = make_console()
    log_to_console(console)
    suite = load_suite(suite_file)
    folder = output or Path(DEFAULT_EXP_DIR) / f"bench_{suite.name}"
    runs = plan_runs(suite, folder, seeds=seeds, backbones=backbones, entries=entries, overrides=overrides)

    def report(line: str) -> None:
        console.print(escape(line), soft_wrap=True)

    lock = FolderLock(folder, "choose another folder with --output")
    try:
        outcomes = run_suite(runs, jobs, report, rerun_outdated=rerun_outdated)
        results = _write_results(folder, outcomes, report)
    finally:
        lock.release()
    if results:
        print_results(make_console(stderr=False), results)
        report(f"results: {folder / 'results'}, page: {folder / 'results.md'}, records: astuner view {folder}")
    failed = [outcome for outcome in outcomes if outcome.result is None]
    for outcome in failed:
        console.print(escape(f"{outcome.run.name} failed: {outcome.failure}"), style="bold red", soft_wrap=True)
    return int(bool(failed))


def _write_results(folder: Path, outcomes: Sequence[RunOutcome], report: Callable[[str], None]) -> list[BenchResult]:
    """Write the runs' results, and in `folder` the page and pictures for all results. Return the runs' results."""
    results = _results(outcomes)
    for result in results:
        _report_lost_seeds(folder / "results" / f"{result.name}.json", result, report)
        write_result(folder / "results", result)
        draw_curves(folder / "plots" / f"{result.name}.png", result)
    # Otherwise a comparison would take an earlier call's result for that of these runs.
    for name in dict.fromkeys(f"{outcome.run.entry.name}-{outcome.run.backbone}" for outcome in outcomes):
        stale = folder / "results" / f"{name}.json"
        if name not in [result.name for result in results] and stale.exists():
            stale.unlink()
            report(f"{stale} is deleted, because no run of {name} finished")
    if results:
        collected = read_results(folder / "results")
        draw_results(folder / "plots" / "gains.png", collected)
        write_atomically(folder / "results.md", results_page(collected, "plots").encode())
    return results


def _report_lost_seeds(path: Path, result: BenchResult, report: Callable[[str], None]) -> None:
    """Report the seeds that the earlier file of a result has and the new one lacks."""
    try:
        (earlier,) = read_results(path)
    except RecordError:  # there is none, or it is damaged
        return
    if lost := sorted({seed.seed for seed in earlier.seeds} - {seed.seed for seed in result.seeds}):
        report(
            f"{path} no longer has the seeds {', '.join(map(str, lost))}, which have no finished run in this command"
        )


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

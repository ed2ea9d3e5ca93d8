"""`astuner bench`: runs a suite over backbones and seeds, reports the gains with intervals, and compares results."""

from astuner.analysis.benchmark.comparison import BenchComparison, ResultComparison, compare_results, print_comparison
from astuner.analysis.benchmark.report import draw_results, print_results
from astuner.analysis.benchmark.results import BenchResult, SeedResult, read_results, result_of, write_result
from astuner.analysis.benchmark.running import BenchRun, RunOutcome, plan_runs, run_suite
from astuner.analysis.benchmark.suite import Suite, SuiteEntry, load_suite

__all__ = [
    "BenchComparison",
    "BenchResult",
    "BenchRun",
    "ResultComparison",
    "RunOutcome",
    "SeedResult",
    "Suite",
    "SuiteEntry",
    "compare_results",
    "draw_results",
    "load_suite",
    "plan_runs",
    "print_comparison",
    "print_results",
    "read_results",
    "result_of",
    "run_suite",
    "write_result",
]

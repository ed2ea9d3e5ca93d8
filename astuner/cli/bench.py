"""The commands `astuner bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from astuner.cli.options import DefaultCommandGroup
from astuner.errors import RecordError


@click.group(cls=DefaultCommandGroup, default="run", no_args_is_help=True)
def bench() -> None:
    """Run a benchmark over backbones and seeds, or compare two results.

    `astuner bench SUITE.yaml` runs a suite; `astuner bench compare A B` compares the results A and B.
    """


def _checked_seeds(_context: click.Context, _option: click.Parameter, value: int | None) -> int | None:
    from astuner.analysis.benchmark.suite import MAX_SEEDS

    if value is not None and value > MAX_SEEDS:
        raise click.BadParameter(f"{value} is not a number of seeds; expected 1 to {MAX_SEEDS}")
    return value


def _checked_backbones(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...]:
    from astuner.analysis.benchmark.suite import BACKBONES

    names = tuple(name.strip() for name in value.split(",")) if value is not None else ()
    for name in names:
        if name not in BACKBONES:
            raise click.BadParameter(f"{name!r} is not a backbone that trains; expected some of {', '.join(BACKBONES)}")
    return names


@bench.command()
@click.argument("suite", type=click.Path(path_type=Path), metavar="SUITE.yaml")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    callback=_checked_seeds,
    metavar="N",
    help="The seeds 1 to N. Other seeds are listed in the suite. [default: those of the suite]",
)
@click.option(
    "--backbones",
    callback=_checked_backbones,
    metavar="NAME,NAME",
    help="Backbones to run on. [default: the suite's, or local]",
)
@click.option("--entry", "entries", multiple=True, metavar="NAME", help="Only this entry. Can be repeated.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of runs at a time.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the records and results. [default: launcher_record/bench_NAME]",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a configuration key in all runs, after the overrides of the suite. Can be repeated.",
)
@click.option(
    "--rerun-outdated",
    is_flag=True,
    help="Start runs again that were recorded with another revision or other versions of astuner, Python or packages.",
)
def run(
    suite: Path,
    seeds: int | None,
    backbones: tuple[str, ...],
    entries: tuple[str, ...],
    jobs: int,
    output: Path | None,
    overrides: tuple[str, ...],
    rerun_outdated: bool,
) -> int:
    """Run a suite, and write its results (the default command).

    Finished runs are kept, and interrupted runs continue. A warning names those that were recorded with other versions.
    The exit code is 1 if a run failed.
    """
    from astuner.analysis.benchmark.command import bench_suite

    return bench_suite(
        suite, output, jobs,
        seeds=seeds, backbones=backbones, entries=entries, overrides=overrides, rerun_outdated=rerun_outdated,
    )  # fmt: skip


@bench.command()
@click.argument("a", type=click.Path(path_type=Path, exists=True))
@click.argument("b", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--level",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.01,
    show_default=True,
    help="Highest probability of reporting a regression if A and B are equal.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="A smaller difference of success is never reported.",
)
@click.option(
    "--until",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Compare the first steps only: success at the validation after STEP, and the curves up to it.",
)
@click.option("--common-seeds", is_flag=True, help="Compare only the seeds that A and B have, with a paired test.")
def compare(a: Path, b: Path, level: float, tolerance: float, until: int | None, common_seeds: bool) -> int:
    """Say where the results B differ from the results A beyond noise.

    A and B are result files, or folders of them. The exit code is 1 if a result in B is worse, if B lacks one of A's
    results, or if a seed failed only in B. It is 2 if A and B cannot be compared, and otherwise 0.
    """
    from astuner.analysis.benchmark.comparison import compare_results, print_comparison
    from astuner.analysis.benchmark.results import read_results
    from astuner.launcher.console import make_console

    try:
        comparison = compare_results(
            read_results(a), read_results(b), level, tolerance, until, common_seeds=common_seeds
        )
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    if a.samefile(b):
        comparison = replace(comparison, notes=(f"A and B are both {a}, so that they are equal", *comparison.notes))
    print_comparison(make_console(stderr=False), comparison)
    return int(comparison.is_regression)

"""The commands `astuner bisect` and `astuner replay`, for repeatable runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from astuner.cli.options import EXP_DIR, complete_runs
from astuner.errors import RecordError


@click.command()
@click.argument("first", metavar="RUN_A", shell_complete=complete_runs)
@click.argument("second", metavar="RUN_B", shell_complete=complete_runs)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Largest absolute difference of logprobs, rewards, advantages and metrics that counts as none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@EXP_DIR
def bisect(first: str, second: str, tolerance: float, as_json: bool, exp_dir: str) -> int:
    """Name the first difference between two runs.

    RUN_A and RUN_B are folders of runs, or their names under --exp-dir. The difference is a configuration key, the
    order of the tasks, an episode, a token, a logprob, a reward, an advantage or the gradient. The exit code is 0 if
    the runs are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    from astuner.analysis.explain import bisect as print_difference
    from astuner.launcher.console import make_console

    try:
        console = make_console(stderr=False)
        is_equal = print_difference(first, second, Path(exp_dir), console, tolerance=tolerance, as_json=as_json)
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    return int(not is_equal)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--step", required=True, type=click.IntRange(min=1), help="The training step to compute again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@EXP_DIR
def replay(run: str, step: int, as_json: bool, exp_dir: str) -> int:
    """Compute the loss and the gradient of a training step of RUN again, and compare them with its record.

    RUN is the run's folder, or its name under --exp-dir; it trained with the local backbone. The update starts from the
    newest checkpoint before the step. The exit code is 0 if the record agrees, 1 if it does not, and 2 if the step
    cannot be computed again.
    """
    from astuner.backbone.local.replay import replay_step
    from astuner.launcher.console import filtered_output, make_console
    from astuner.run_record.lookup import find_run

    try:
        with filtered_output():
            result = replay_step(find_run(run, Path(exp_dir)), step)
    except RecordError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps({**asdict(result), "agrees": result.agrees}, indent=2))
        return int(not result.agrees)
    console = make_console(stderr=False)
    for line in result.lines():
        console.print(line, markup=False, soft_wrap=True)
    return int(not result.agrees)

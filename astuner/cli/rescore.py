"""The command `astuner rescore`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from astuner.cli.options import EXP_DIR, complete_runs, params_option


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--judge",
    "judges",
    required=True,
    multiple=True,
    metavar="CLASS",
    help="The new judge, package.module->Class. A second --judge is the held-out judge of an audit.",
)
@params_option("--param", "Parameter of the judge, with a YAML value. Can be repeated.")
@params_option("--held-out-param", "Parameter of the second judge, with a YAML value. Can be repeated.")
@click.option("--audit", is_flag=True, help="Look for reward hacking. With one judge, it audits the recorded rewards.")
@click.option("--step", type=click.IntRange(min=0), help="Judge only the episodes of this step.")
@click.option("--split", type=click.Choice(["train", "val"]), help="Split of the episodes. [default: train, if any]")
@click.option(
    "--timeout",
    type=click.FloatRange(0, 1e8, min_open=True),
    help="Time limit of the judge for an episode, in seconds. [default: task_judge.timeout of the run]",
)
@click.option(
    "--jobs", type=click.IntRange(1, 4096), default=64, show_default=True, help="Number of concurrent episodes."
)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR", help="New folder of the result. [default: beside RUN]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@EXP_DIR
def rescore(
    run: str,
    judges: tuple[str, ...],
    param: dict[str, Any],
    held_out_param: dict[str, Any],
    audit: bool,
    step: int | None,
    split: Literal["train", "val"] | None,
    timeout: float | None,
    jobs: int,
    output: Path | None,
    as_json: bool,
    exp_dir: str,
) -> None:
    """Score the episodes of RUN with another judge, and compare the rewards and advantages. Needs no model.

    RUN is the run's folder, or its name under --exp-dir. The record of the run is not changed.
    """
    from astuner.analysis.rescore import RescoreOptions
    from astuner.analysis.rescore import rescore as judge_anew

    if len(judges) > 2:
        raise click.UsageError("--judge can be given twice at most: the new judge and the held-out judge")
    if held_out_param and len(judges) < 2:
        raise click.UsageError("--held-out-param needs a second --judge")
    options = RescoreOptions(judges, param, held_out_param, audit, step, split, timeout, jobs, output, as_json)
    judge_anew(run, Path(exp_dir), options)

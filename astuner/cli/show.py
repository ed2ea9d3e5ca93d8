"""The commands on recorded runs: `astuner explain`, `view`, `export`, `bisect`, `replay`, `rescore` and `runs`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from astuner.cli.options import EXP_DIR, complete_runs, params_option
from astuner.errors import RecordError

RUN = click.argument("run", shell_complete=complete_runs)
_SORT_KEYS = ("started", "run", "state", "steps", "reward", "success", "seconds")


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.argument("episode", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--step", type=click.IntRange(min=0), help="Only the episodes of this step.")
@click.option("--split", type=click.Choice(["train", "val"]), help="Split of the episodes. [default: train, if any]")
@click.option("--no-certificate", is_flag=True, help="Read only the index: faster, but does not verify episodes.")
@EXP_DIR
def explain(
    run: str,
    episode: str | None,
    as_json: bool,
    step: int | None,
    split: Literal["train", "val"] | None,
    no_certificate: bool,
    exp_dir: str,
) -> None:
    """Explain how the LLM calls of RUN became training samples: tokens, forks and how to avoid them.

    RUN is the run's folder, or its name under --exp-dir. EPISODE is an episode id or a unique prefix of one.
    """
    from astuner.analysis.explain.command import explain as print_explanation

    if episode is not None and (step is not None or split is not None or no_certificate):
        raise click.UsageError("--step, --split and --no-certificate cannot be combined with EPISODE")
    print_explanation(run, episode, Path(exp_dir), step=step, split=split, certify=not no_certificate, as_json=as_json)


@click.command()
@click.argument("folder", default="launcher_record", metavar="[DIR]")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 for any free one."
)
@click.option("--tui", is_flag=True, help="Show the runs in this terminal, for example over ssh.")
def view(folder: str, port: int, tui: bool) -> None:
    """Show the runs in DIR in the browser, or with --tui in the terminal.

    DIR is launcher_record by default. The page is served on this machine only, until Ctrl-C.
    """
    if tui:
        from astuner.viewer.tui import show_in_terminal

        show_in_terminal(Path(folder))
        return
    from astuner.viewer.http_server import serve

    serve(Path(folder), port, lambda address: click.echo(f"showing {folder} at {address} (press Ctrl-C to stop)"))


def _episode_limit(_context: click.Context, _option: click.Parameter, value: str) -> int | None:
    """Return the number of --episodes; None for `all`."""
    if value == "all":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor `all`")
    return int(value)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--format",
    "to",
    type=click.Choice(["jsonl", "parquet", "html", "snapshot"]),
    default="jsonl",
    show_default=True,
    help="jsonl: episodes; parquet: training samples; html: one episode as a page; snapshot: a folder with the run's "
    "pages, which a browser opens without a server.",
)
@click.option("--episode", metavar="ID", help="Only this episode, by its id or a unique prefix; required for html.")
@click.option(
    "--episodes",
    default="200",
    show_default=True,
    metavar="N|all",
    callback=_episode_limit,
    help="Number of episodes that a snapshot contains in full.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="PATH", help="Output file, or folder. [default: in this folder]"
)
@EXP_DIR
def export(
    run: str,
    to: Literal["jsonl", "parquet", "html", "snapshot"],
    episode: str | None,
    episodes: int | None,
    out: Path | None,
    exp_dir: str,
) -> None:
    """Export the episodes, the training samples or the pages of RUN.

    Damaged lines and episodes are reported and skipped. It is an error if nothing can be exported.
    """

    def report(text: str) -> None:
        click.echo(text, err=True)

    if to == "snapshot":
        from astuner.viewer.snapshot import export_snapshot

        if episode is not None:
            raise click.UsageError("a snapshot has many episodes; use --episodes, or --format html for one episode")
        click.echo(export_snapshot(run, Path(exp_dir), out, episodes, report))
        return
    from astuner.viewer.export import export_run

    click.echo(export_run(run, Path(exp_dir), to, out, episode, report))


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
    from astuner.analysis.explain.bisect import bisect as print_difference
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
    """Compute a training step's loss and gradient again, and compare them with the record of RUN.

    RUN is the run's folder, or its name under --exp-dir; it trained with the local backbone. The update starts from the
    newest checkpoint before the step. The exit code is 0 if the record agrees, 1 if it does not, and 2 if the step
    cannot be computed again.
    """
    from astuner.backbone.local.replay import replay_step
    from astuner.launcher.console import filtered_output, make_console
    from astuner.run_record.recorded_run import find_run

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
    from astuner.analysis.rescore.command import RescoreOptions
    from astuner.analysis.rescore.command import rescore as judge_anew

    if len(judges) > 2:
        raise click.UsageError("--judge can be given twice at most: the new judge and the held-out judge")
    if held_out_param and len(judges) < 2:
        raise click.UsageError("--held-out-param needs a second --judge")
    options = RescoreOptions(judges, param, held_out_param, audit, step, split, timeout, jobs, output, as_json)
    judge_anew(run, Path(exp_dir), options)


@click.group(name="runs", invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.option(
    "--filter",
    "words",
    multiple=True,
    metavar="TEXT",
    help="Only runs with this text in name, kind, state, backbone, algorithm, model, note or tags. Can be repeated.",
)
@click.option(
    "--sort",
    type=click.Choice(_SORT_KEYS),
    default="started",
    show_default=True,
    help="Field by which the runs are sorted.",
)
@click.option("--all", "show_all", is_flag=True, help="Also list debug runs, dry runs and renamed earlier runs.")
@EXP_DIR
@click.pass_context
def runs(ctx: click.Context, as_json: bool, words: tuple[str, ...], sort: str, show_all: bool, exp_dir: str) -> None:
    """List, compare, annotate and delete recorded runs."""
    if ctx.invoked_subcommand is not None:
        if given := [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]:
            option = next(option.opts[0] for option in ctx.command.params if option.name == given[0])
            raise click.UsageError(
                f"{option} must follow the command: astuner runs {ctx.invoked_subcommand} {option} …"
            )
        return
    from astuner.analysis.runs import read_runs, runs_table, select_runs
    from astuner.launcher.console import make_console

    rows, hidden = select_runs(read_runs(Path(exp_dir)), words, sort, show_all=show_all)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    console = make_console(stderr=False)
    console.print(runs_table(rows))
    if hidden:
        console.print(
            f"{hidden} debug runs, dry runs and renamed earlier runs are hidden; --all lists them", style="dim"
        )


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=complete_runs)
@EXP_DIR
def compare(names: tuple[str, ...], exp_dir: str) -> None:
    """Compare the results and the configurations of runs."""
    if len(names) < 2:
        raise click.UsageError(f"a comparison needs at least two runs, got {len(names)}")
    from astuner.analysis.runs import print_comparison
    from astuner.launcher.console import make_console
    from astuner.run_record.recorded_run import RecordedRun, find_run

    print_comparison(make_console(stderr=False), [RecordedRun(find_run(name, Path(exp_dir))) for name in names])


@runs.command()
@RUN
@click.argument("text", required=False)
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="Set the tags to these words. Can be repeated.")
@click.option("--clear", is_flag=True, help="Remove the note and the tags.")
@EXP_DIR
def note(run: str, text: str | None, tags: tuple[str, ...], clear: bool, exp_dir: str) -> None:
    """Write a note about RUN and tag it, or show both."""
    from astuner.run_record.recorded_run import RecordedRun, RunNote, find_run, write_note

    folder = find_run(run, Path(exp_dir))
    earlier = RunNote() if clear else RecordedRun(folder).note
    written = RunNote(text=earlier.text if text is None else text, tags=tags or earlier.tags)
    if clear or text is not None or tags:
        write_note(folder, written)
    click.echo(" ".join([written.text, *(f"#{tag}" for tag in written.tags)]).strip() or f"{run} has no note")


@runs.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@EXP_DIR
def delete(names: tuple[str, ...], yes: bool, exp_dir: str) -> None:
    """Delete runs, with their checkpoints and models."""
    from astuner.analysis.runs import delete_run
    from astuner.run_record.recorded_run import find_run

    folders = [find_run(name, Path(exp_dir)) for name in dict.fromkeys(names)]
    for folder in folders:
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        click.echo(f"{folder}: {sum(file.lstat().st_size for file in files) / 2**20:,.1f} MiB")
    if not yes:
        click.confirm("delete them?" if len(folders) > 1 else "delete it?", abort=True)
    for folder in folders:
        delete_run(folder)
        click.echo(f"deleted {folder}")

"""The commands `astuner runs`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.core import ParameterSource

from astuner.cli.options import EXP_DIR, complete_runs

RUN = click.argument("run", shell_complete=complete_runs)
_SORT_KEYS = ("started", "run", "state", "steps", "reward", "success", "seconds")


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
    from astuner.run_record.lookup import find_run
    from astuner.run_record.run_facts import read_facts

    print_comparison(make_console(stderr=False), [read_facts(find_run(name, Path(exp_dir))) for name in names])


@runs.command()
@RUN
@click.argument("text", required=False)
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="Set the tags to these words. Can be repeated.")
@click.option("--clear", is_flag=True, help="Remove the note and the tags.")
@EXP_DIR
def note(run: str, text: str | None, tags: tuple[str, ...], clear: bool, exp_dir: str) -> None:
    """Write a note about RUN and tag it, or show both."""
    from astuner.run_record.lookup import find_run
    from astuner.run_record.run_facts import RunNote, read_note, write_note

    folder = find_run(run, Path(exp_dir))
    earlier = RunNote() if clear else read_note(folder)
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
    from astuner.analysis.runs import delete_run, folder_size
    from astuner.run_record.lookup import find_run

    folders = [find_run(name, Path(exp_dir)) for name in dict.fromkeys(names)]
    for folder in folders:
        click.echo(f"{folder}: {folder_size(folder) / 2**20:,.1f} MiB")
    if not yes:
        click.confirm("delete them?" if len(folders) > 1 else "delete it?", abort=True)
    for folder in folders:
        delete_run(folder)
        click.echo(f"deleted {folder}")

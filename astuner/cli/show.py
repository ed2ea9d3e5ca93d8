"""The commands that show recorded runs: `astuner explain`, `astuner view` and `astuner export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from astuner.cli.options import EXP_DIR, complete_runs


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
    from astuner.analysis.explain import explain as print_explanation

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

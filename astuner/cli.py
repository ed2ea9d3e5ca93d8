"""The `astuner` command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from astuner.cli_bench import bench
from astuner.cli_chat import chat
from astuner.cli_completion import completion
from astuner.cli_data import generate, trace
from astuner.cli_env import env
from astuner.cli_environments import doctor, install
from astuner.cli_init import init
from astuner.cli_options import (
    BACKBONE,
    CHECKPOINT_DIR,
    CONF,
    DEBUGGER,
    EXP_DIR,
    OVERRIDES,
    SERVICES,
    SHOW,
    ServicesCommand,
    TrainByDefaultGroup,
    complete_runs,
    quoted,
    show_error,
    show_usage_error,
    tinker_limits,
)
from astuner.cli_repeat import bisect, replay
from astuner.cli_rescore import rescore
from astuner.cli_runs import runs
from astuner.cli_serve import serve
from astuner.debugging.signals import Terminated, terminate_on
from astuner.errors import AstunerError
from astuner.redaction import learn_secret_settings

if TYPE_CHECKING:
    from astuner.launcher.launch import Launcher
    from astuner.launcher.transcripts import Shown


@click.group(
    cls=TrainByDefaultGroup,
    commands=[
        bench,
        bisect,
        chat,
        completion,
        doctor,
        env,
        generate,
        init,
        install,
        replay,
        rescore,
        runs,
        serve,
        trace,
    ],
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="astuner")
def astuner() -> None:
    """Fine-tune the language model of an agent with reinforcement learning.

    `astuner --conf FILE [KEY=VALUE]...` trains. KEY is a full configuration key, such as
    astuner.trainer_common.optim.lr.
    """


@astuner.command(cls=ServicesCommand)
@CONF
@BACKBONE
@click.option("--model", metavar="PATH", help="Override astuner.model.path: folder or Hugging Face name of the model.")
@click.option("--validation", is_flag=True, help="Roll out validation tasks. Only with --backbone=debug.")
@click.option(
    "--keep-engine",
    is_flag=True,
    help="Keep the vLLM server warm for later runs. Only with --backbone=debug and rollout.name: vllm.",
)
@SHOW
@DEBUGGER
@SERVICES
@EXP_DIR
@OVERRIDES
def train(
    conf: Path,
    backbone: str | None,
    model: str | None,
    validation: bool,
    keep_engine: bool,
    show: Shown | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Train the model (the default command).

    With --backbone=debug, roll out a few episodes without training.
    """
    if model is not None:
        overrides = (*overrides, f"astuner.model.path={quoted(model)}")
    launcher = _load(conf, overrides, backbone, exp_dir, services)
    if launcher.config.astuner.backbone == "debug":
        launcher.debug("val" if validation else "train", keep_engine=keep_engine, shown=show)
    elif keep_engine:
        raise click.UsageError("--keep-engine requires --backbone=debug and rollout.name: vllm")
    elif show is not None:
        raise click.UsageError("--show requires --backbone=debug; `astuner check --dry-run` has it too")
    elif validation:
        raise click.UsageError("--validation requires --backbone=debug; to evaluate a model, use `astuner eval`")
    else:
        launcher.train()


@astuner.command(name="eval", cls=ServicesCommand)
@CONF
@click.option("--model", metavar="PATH", help="Folder or Hugging Face name of the model. [default: astuner.model.path]")
@click.option("--tasks", type=click.IntRange(min=1), help="Number of validation tasks, from the first. [default: all]")
@BACKBONE
@DEBUGGER
@SERVICES
@EXP_DIR
@OVERRIDES
def evaluate(
    conf: Path,
    model: str | None,
    tasks: int | None,
    backbone: str | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Evaluate a model on the validation tasks."""
    _load(conf, overrides, backbone, exp_dir, services).evaluate(model, tasks)


@astuner.command(cls=ServicesCommand)
@CONF
@click.option("--dry-run", is_flag=True, help="Also roll out a few training episodes.")
@click.option(
    "--machine",
    metavar="NxTYPE-SIZEG",
    help="Instead, estimate the memory of each GPU of such a machine, for example 8xH100-80G. Needs no GPU.",
)
@BACKBONE
@SHOW
@DEBUGGER
@SERVICES
@EXP_DIR
@OVERRIDES
def check(
    conf: Path,
    dry_run: bool,
    machine: str | None,
    backbone: str | None,
    show: Shown | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Check a configuration without training, and show the size of the run."""
    if show is not None and not dry_run:
        raise click.UsageError("--show requires --dry-run")
    if machine is not None:
        if dry_run or services:
            raise click.UsageError("--machine starts nothing; leave out --dry-run and the options of services")
        from astuner.launcher.machine_check import check_machine

        check_machine(conf, overrides, backbone, machine)
        return
    launcher = _load(conf, overrides, backbone, exp_dir, services)
    from astuner.launcher.check import check_run

    check_run(launcher, dry_run=dry_run, shown=show)


def _load(
    conf: Path, overrides: tuple[str, ...], backbone: str | None, exp_dir: str, services: tuple[str, ...]
) -> Launcher:
    """Load the configuration; re-execute the command in the backbone's environment if necessary."""
    from astuner.config.backbone_choice import check_gpus
    from astuner.config.loading import load_config, resolve_names
    from astuner.environments.reexec import enter_environment

    loaded = load_config(conf, overrides, backbone)
    check_gpus(resolve_names(loaded.config, loaded.path).astuner, services)
    enter_environment(loaded.backbone)
    from astuner.launcher.launch import Launcher

    return Launcher.from_loaded(loaded, exp_dir, services)


@astuner.command()
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
    from astuner.explain import explain as print_explanation

    if episode is not None and (step is not None or split is not None or no_certificate):
        raise click.UsageError("--step, --split and --no-certificate cannot be combined with EPISODE")
    print_explanation(run, episode, Path(exp_dir), step=step, split=split, certify=not no_certificate, as_json=as_json)


@astuner.command(name="stop-engine")
def stop_engine() -> None:
    """Stop the warm vLLM servers, which --keep-engine keeps running."""
    from astuner.llm_engine.vllm_server.warm_servers import stop_warm_servers

    stopped = stop_warm_servers()
    for server in stopped:
        click.echo(f"stopped the warm vLLM server on port {server.settings.port} (process {server.server.pid})")
    if not stopped:
        click.echo("no warm vLLM server is running")


@astuner.command()
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
        from astuner.launcher.tui import show_in_terminal

        show_in_terminal(Path(folder))
        return
    from astuner.viewer.server import serve

    serve(Path(folder), port, lambda address: click.echo(f"showing {folder} at {address} (press Ctrl-C to stop)"))


def _episode_limit(_context: click.Context, _option: click.Parameter, value: str) -> int | None:
    """Return the number of --episodes; None for `all`."""
    if value == "all":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor `all`")
    return int(value)


@astuner.command()
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


@astuner.command(name="serve-tinker")
@click.option(
    "--model", required=True, metavar="PATH", help="Folder, Hugging Face name or package.module->f, as model.path."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0 for any free one.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "fastest"]), default="auto", show_default=True
)
@CHECKPOINT_DIR
@tinker_limits
def serve_tinker(
    model: str,
    port: int,
    device: str,
    dtype: str,
    checkpoint_dir: Path,
    max_models: int,
    max_engines: int,
    max_samplers: int,
    max_body: int,
) -> None:
    """Serve a model to training loops written for Tinker (tinker 0.20 to 0.38).

    The server listens on this machine only, until Ctrl-C.
    """
    from astuner.tinker_server import Limits, ServerOptions, serve

    limits = Limits(max_models, max_engines, max_samplers, max_body * 2**20)
    serve(
        ServerOptions(model, port, device, dtype, checkpoint_dir, limits),
        lambda address, names: click.echo(f"serving {names[0]} at {address} (press Ctrl-C to stop)"),
    )


def main() -> None:
    """Run the command and exit.

    Exit codes: 0 for success, 1 for an error (printed as one message), 2 for an invalid command line, 130 for Ctrl-C,
    128 + n if signal n ended the command (143 for SIGTERM).
    """
    with terminate_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
        code = _run(received)
    sys.exit(code)


def _run(received: Sequence[int]) -> int:
    learn_secret_settings(sys.argv[1:])
    try:
        result: Any = astuner.main(standalone_mode=False)
    except click.ClickException as error:
        return show_usage_error(error)
    except (Exception, KeyboardInterrupt) as raised:
        # click raises Abort for Ctrl-C and at the end of input.
        cause = raised.__cause__ or raised if isinstance(raised, click.Abort) else raised
        # A library that a signal interrupts may raise another error, and Ray raises an ordinary KeyboardInterrupt.
        is_expected = isinstance(cause, AstunerError | KeyboardInterrupt) and type(cause) is not KeyboardInterrupt
        return show_error(Terminated(received[-1]) if received and not is_expected else cause)
    return result if isinstance(result, int) else 0

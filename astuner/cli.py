"""The `astuner` command."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from astuner.breakpoints import choose_tags
from astuner.command_groups import TrainByDefault, WithServices
from astuner.errors import AstunerError
from astuner.signals import Terminated, orderly_end_on

if TYPE_CHECKING:
    from astuner.launcher.launch import Launch

_CONF = click.option(
    "--conf",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The YAML configuration.",
)
_BACKBONE = click.option(
    "--backbone", metavar="NAME", help="Overrides astuner.backbone: debug, local, verl or trinity."
)
_EXP_DIR = click.option(
    "--exp-dir", default="launcher_record", show_default=True, metavar="DIR", help="Where run records go."
)
_SERVICES = click.option(
    "--with-NAME",
    "services",
    multiple=True,
    metavar="",
    help="Start the service NAME before, and stop it after: one of astuner.services, or ray, ray-cluster, logview, "
    "appworld.",
)


def _stop_at(_context: click.Context, _option: click.Parameter, tags: str | None) -> None:
    if tags is not None:
        choose_tags(tags)


_DB = click.option(
    "--db",
    metavar="TAG1|TAG2",
    expose_value=False,
    callback=_stop_at,
    help="Stop in the debugger at the lines bp('TAG1') and bp('TAG2'): with --backbone=debug in this terminal, one "
    "episode at a time; in training through debug.debugger_port.",
)
_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(cls=TrainByDefault, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="astuner")
def astuner() -> None:
    """Tune the model behind an agent: your workflow, your tasks, your judge.

    `astuner --conf FILE [KEY=VALUE]…` trains; KEY is a full path such as astuner.trainer_common.optim.lr.
    """


@astuner.command(cls=WithServices)
@_CONF
@_BACKBONE
@click.option("--validation", is_flag=True, help="With --backbone=debug: roll out validation tasks.")
@click.option(
    "--keep-engine",
    is_flag=True,
    help="With --backbone=debug and rollout.name vllm: leave the vLLM server warm for the next run.",
)
@_DB
@_SERVICES
@_EXP_DIR
@_OVERRIDES
def train(
    conf: Path,
    backbone: str | None,
    validation: bool,
    keep_engine: bool,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Tune the model (the default command); with --backbone=debug, roll out a few episodes and stop there."""
    launch = _launch(conf, overrides, backbone, exp_dir, services)
    if launch.config.astuner.backbone == "debug":
        launch.debug("val" if validation else "train", keep_engine=keep_engine)
    elif keep_engine:
        raise click.UsageError("--keep-engine is for --backbone=debug, where rollout.name is vllm")
    elif validation:
        raise click.UsageError("--validation is for --backbone=debug; `astuner eval` measures on the validation tasks")
    else:
        launch.train()


@astuner.command(name="eval", cls=WithServices)
@_CONF
@click.option("--model", metavar="PATH", help="Measure this folder or hub name instead of astuner.model.path.")
@click.option("--tasks", type=click.IntRange(min=1), help="Measure the first N validation tasks only.")
@_BACKBONE
@_DB
@_SERVICES
@_EXP_DIR
@_OVERRIDES
def evaluate(
    conf: Path,
    model: str | None,
    tasks: int | None,
    backbone: str | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Measure a model on the validation tasks."""
    _launch(conf, overrides, backbone, exp_dir, services).evaluate(model, tasks)


@astuner.command(cls=WithServices)
@_CONF
@click.option("--dry-run", is_flag=True, help="Also roll out a few training episodes.")
@_BACKBONE
@_DB
@_SERVICES
@_EXP_DIR
@_OVERRIDES
def check(
    conf: Path,
    dry_run: bool,
    backbone: str | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Say what a run would do, and what is wrong, before it is started."""
    launch = _launch(conf, overrides, backbone, exp_dir, services)
    from astuner.launcher.check import check_launch

    check_launch(launch, dry_run=dry_run)


def _launch(
    conf: Path, overrides: tuple[str, ...], backbone: str | None, exp_dir: str, services: tuple[str, ...]
) -> Launch:
    """Load the configuration, and go on in its backbone's own environment where there has to be one."""
    from astuner.config.loading import load_config
    from astuner.launcher.environments.entering import enter_environment

    loaded = load_config(conf, overrides, backbone)
    enter_environment(loaded.config.astuner.backbone)
    from astuner.launcher.launch import Launch

    return Launch.of_loaded(loaded, exp_dir, services)


@astuner.command(name="install")
@click.argument("backbone")
@click.option("--cpu", "device", flag_value="cpu", help="For the CPU; the default where there is no NVIDIA GPU.")
@click.option("--cuda", "device", flag_value="cuda", help="For NVIDIA GPUs; the default where there is one.")
@click.option(
    "--vllm", is_flag=True, help="On a CPU, with vLLM's build for it (rollout.name: vllm); on a GPU, vLLM is always in."
)
@click.option("--python", metavar="PYTHON", help="The interpreter, as a path or a command; this one by default.")
@click.option(
    "--with", "extra", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="A requirements.txt of your agent's, resolved together with the backbone's pins; may be given again.",
)  # fmt: skip
@click.option("--path", type=click.Path(path_type=Path), metavar="DIR", help="Where to, instead of the usual place.")
@click.option("--index", default="", metavar="URL", help="A further package index, such as that of PyTorch's builds.")
@click.option("--pip", is_flag=True, help="Use pip although uv is there, for instance for its configuration.")
@click.option("--fresh", is_flag=True, help="Make it anew, without what --with brought earlier.")
def install_environment(
    backbone: str,
    device: Literal["cpu", "cuda"] | None,
    vllm: bool,
    python: str | None,
    extra: tuple[Path, ...],
    path: Path | None,
    index: str,
    pip: bool,
    fresh: bool,
) -> None:
    """Make the environment of BACKBONE, verl or trinity, with the versions that it was tested with.

    What is there already stays; `astuner doctor` says what is there. `astuner --backbone=BACKBONE` goes there by
    itself.
    """
    from astuner.launcher.environments.command import install_backbone

    install_backbone(
        backbone, device, vllm=vllm, python=python, extra=extra, folder=path, index=index, pip=pip, fresh=fresh
    )


@astuner.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> int:
    """Say for each backbone what is installed, what is wrong, and the command that mends it.

    The exit code is 1 if something that is installed is broken.
    """
    from astuner.launcher.console import make_console
    from astuner.launcher.environments.doctor import examine
    from astuner.launcher.environments.doctor_report import exit_code, print_reports

    reports = examine()
    print_reports(make_console(stderr=False), reports, as_json=as_json)
    return exit_code(reports)


@astuner.command()
@click.argument("run")
@click.argument("episode", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--step", type=click.IntRange(min=0), help="Account for the episodes of this step only.")
@click.option("--split", type=click.Choice(["train", "val"]), help="Training or validation; train if there is any.")
@click.option("--no-certificate", is_flag=True, help="Read the index only: faster, but checks no episode.")
@_EXP_DIR
def explain(
    run: str,
    episode: str | None,
    as_json: bool,
    step: int | None,
    split: Literal["train", "val"] | None,
    no_certificate: bool,
    exp_dir: str,
) -> None:
    """Say how the calls of RUN became what was trained: tokens, forks and what to try against them.

    RUN is the run's folder, or its name under --exp-dir. EPISODE is an id as in the record, or how it alone begins.
    """
    from astuner.launcher.explain import explain as print_explanation

    if episode is not None and (step is not None or split is not None or no_certificate):
        raise click.UsageError("--step, --split and --no-certificate are for a whole run; leave them out with EPISODE")
    print_explanation(run, episode, Path(exp_dir), step=step, split=split, certify=not no_certificate, as_json=as_json)


@astuner.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Write a small project that runs as it is: agent, judge, tasks, YAML, and VS Code's launch.json.

    It goes into FOLDER, the working directory by default. Files that are there are kept.
    """
    from astuner.launcher.starter import start_project

    started = start_project(folder)
    for name in started.written:
        click.echo(f"wrote {folder / name}")
    for name in started.kept:
        click.echo(f"kept {folder / name}, which was there")
    if "agent.yaml" in started.written and {"agent.py", "judge.py"} & set(started.kept):
        click.echo("the YAML was written for the starter's own agent and judge: name yours in agent.yaml")
    elif started.written:
        enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        click.echo(f"now: {enter}astuner --conf agent.yaml --backbone=debug")


@astuner.command(name="stop-engine")
def stop_engine() -> None:
    """End the vLLM servers that --keep-engine has left warm."""
    from astuner.backbone.vllm_server.kept import stop_kept_servers

    stopped = stop_kept_servers()
    for kept in stopped:
        click.echo(f"stopped the vLLM server on port {kept.settings.port} (process {kept.server.pid})")
    if not stopped:
        click.echo("no vLLM server is kept")


@astuner.command()
@click.argument("folder", default="launcher_record", metavar="[DIR]")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes a free one.")
def view(folder: str, port: int) -> None:
    """Show the runs in DIR (launcher_record) as a page in the browser, on this machine only, until Ctrl-C."""
    from astuner.viewer.server import serve

    serve(Path(folder), port, lambda address: click.echo(f"showing {folder} at {address} (Ctrl-C ends)"))


@astuner.command()
@click.argument("run")
@click.option("--format", "to", type=click.Choice(["jsonl", "parquet", "html"]), default="jsonl", show_default=True)
@click.option("--episode", metavar="ID", help="This episode only, by its id or how it alone begins; html needs one.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to; by default in this folder.")
@_EXP_DIR
def export(
    run: str, to: Literal["jsonl", "parquet", "html"], episode: str | None, out: Path | None, exp_dir: str
) -> None:
    """Write the episodes of RUN as JSON lines, its samples as Parquet, or an episode as one HTML file.

    What is damaged in the record is left out and named; only if nothing is left, it is an error.
    """
    from astuner.viewer.export import export_run

    click.echo(export_run(run, Path(exp_dir), to, out, episode, lambda text: click.echo(text, err=True)))


@astuner.command(name="serve-tinker")
@click.option("--model", required=True, metavar="PATH", help="As model.path: a folder, a hub name, package.module->f.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 takes a free one.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    default=Path("launcher_record/tinker"),
    show_default=True,
    metavar="DIR",
    help="Where weights are saved; a server that is started again finds them there.",
)
@click.option("--max-models", type=click.IntRange(1), default=4, show_default=True, help="Models in training at once.")
@click.option(
    "--max-engines", type=click.IntRange(1), default=3, show_default=True, help="Weights in memory to sample."
)
@click.option("--max-samplers", type=click.IntRange(1), default=8, show_default=True, help="Kept of each run on disk.")
def serve_tinker(
    model: str,
    port: int,
    device: str,
    dtype: str,
    checkpoint_dir: Path,
    max_models: int,
    max_engines: int,
    max_samplers: int,
) -> None:
    """Serve a model to training loops written for Tinker (tinker 0.20), on this machine only, until Ctrl-C."""
    from astuner.backbone.tinker_server import Limits, ServerOptions, serve

    limits = Limits(max_models, max_engines, max_samplers)
    serve(
        ServerOptions(model, port, device, dtype, checkpoint_dir, limits),
        lambda address, names: click.echo(f"serving {names[0]} at {address} (Ctrl-C ends)"),
    )


def main() -> None:
    """Run the command and exit.

    Exit codes: 0 done, 1 an error (printed as one message), 2 a command line that cannot be understood, 130 Ctrl-C,
    128 + n ended by signal n (143 for SIGTERM).
    """
    with orderly_end_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
        code = _run(received)
    sys.exit(code)


def _run(received: Sequence[int]) -> int:
    try:
        outcome: Any = astuner.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as abort:  # click's name for Ctrl-C, and for an end of input
        return _report(abort.__cause__ or abort)
    except (Exception, KeyboardInterrupt) as error:
        # A signal that came in the midst of a library's work may come out as an error of that library's.
        ended = bool(received) and not isinstance(error, AstunerError | KeyboardInterrupt)
        return _report(Terminated(received[-1]) if ended else error)
    return outcome if isinstance(outcome, int) else 0


def _report(error: BaseException) -> int:
    """Print what ended the command; return the exit code."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("interrupted", err=True)
        return 128 + getattr(error, "signal_number", signal.SIGINT)
    from astuner.launcher.console import print_error, print_unexpected

    if isinstance(error, AstunerError):
        print_error(error)
    else:
        print_unexpected(error)
    return 1

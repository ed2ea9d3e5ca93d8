"""The `astuner` command line."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from astuner.cli.options import (
    BACKBONE,
    CONF,
    DEBUGGER,
    EXP_DIR,
    OVERRIDES,
    SERVICES,
    SHOW,
    ServicesCommand,
    TrainByDefaultGroup,
    quoted,
    show_error,
    show_usage_error,
)
from astuner.doors import through_door
from astuner.errors import AstunerError
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction.redactor import learn_secret_settings
from astuner.system.signals import Terminated, terminate_on

if TYPE_CHECKING:
    from astuner.launcher.launch import Launcher
    from astuner.viewer.transcripts import Shown


@click.group(cls=TrainByDefaultGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="astuner")
def astuner() -> None:
    """Fine-tune the language model of an agent with reinforcement learning.

    `astuner --conf FILE [KEY=VALUE]...` trains. KEY is a full configuration key, such as
    astuner.trainer_common.optim.lr.
    """


@astuner.command(cls=ServicesCommand)
@CONF
@BACKBONE
@click.option(
    "--model", metavar="PATH", help="Override astuner.model.path: folder or Hugging Face name of the model, or a run."
)
@click.option("--validation", is_flag=True, help="Roll out validation tasks. Only with --backbone=debug.")
@click.option(
    "--keep-engine",
    is_flag=True,
    help="Keep the vLLM server warm for later runs. Only with --backbone=debug and rollout.name: vllm.",
)
@click.option(
    "--require",
    type=click.Choice(["learned", "not-worse"]),
    help="Exit with code 3 if the run's verdict is another: it did not learn, or it got worse.",
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
    require: str | None,
    show: Shown | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> int:
    """Train the model (the default command).

    With --backbone=debug, roll out a few episodes without training.
    """
    if model is not None:
        overrides = (*overrides, f"astuner.model.path={quoted(_of_run(model, exp_dir))}")
    launcher = load_launcher(conf, overrides, backbone, exp_dir, services)
    if launcher.config.astuner.backbone == "debug":
        if require is not None:
            raise click.UsageError("--require needs a training; --backbone=debug has no verdict")
        launcher.debug("val" if validation else "train", keep_engine=keep_engine, shown=show)
    elif keep_engine:
        raise click.UsageError("--keep-engine requires --backbone=debug and rollout.name: vllm")
    elif show is not None:
        raise click.UsageError("--show requires --backbone=debug; `astuner check --dry-run` has it too")
    elif validation:
        raise click.UsageError("--validation requires --backbone=debug; to evaluate a model, use `astuner eval`")
    else:
        launcher.train()
        if require is not None:
            from astuner.run_record.recorded_run import RecordedRun, run_outcome

            outcome = run_outcome(RecordedRun(Path(launcher.config.astuner.experiment_dir)))
            return 3 if outcome == "worse" or (require == "learned" and outcome != "learned") else 0
    return 0


@astuner.command(name="eval", cls=ServicesCommand)
@CONF
@click.option(
    "--model",
    metavar="PATH",
    help="Folder or Hugging Face name of the model, or the run that tuned it. [default: astuner.model.path]",
)
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
    model = None if model is None else _of_run(model, exp_dir)
    load_launcher(conf, overrides, backbone, exp_dir, services).evaluate(model, tasks)


def _of_run(model: str, exp_dir: str) -> str:
    """Return the folder of the model that a run tuned, if `model` is the name of a run, else `model`."""
    from astuner.run_record.folder import is_record

    folder = Path(exp_dir, model)
    if Path(model).exists() or not is_record(folder):
        return model
    return str(folder / "model" if (folder / "model").exists() else folder)


def load_launcher(
    conf: Path, overrides: tuple[str, ...], backbone: str | None, exp_dir: str, services: tuple[str, ...]
) -> Launcher:
    """Load the configuration; re-execute the command in the backbone's environment if necessary."""
    # First, because the next imports take a second.
    with contextlib.suppress(OSError):  # nobody reads it any more
        click.secho(f"{time.strftime('%H:%M:%S')} reading {escape_control_characters(str(conf))}", err=True, dim=True)
    from astuner.config.loading import check_gpus, load_config, resolve_names
    from astuner.config.section import RAY

    loaded = load_config(conf, overrides, backbone)
    check_gpus(resolve_names(loaded.config, loaded.path).astuner, services)
    if loaded.backbone.name in RAY:
        through_door("installed", "enter")(loaded.backbone)
    from astuner.launcher.launch import Launcher

    return Launcher.from_loaded(loaded, exp_dir, services)


def main() -> None:
    """Run the command and exit.

    Exit codes: 0 for success, 1 for an error (printed as one message), 2 for an invalid command line, 3 for a verdict
    that --require rejects, 130 for Ctrl-C, 128 + n if signal n ended the command (143 for SIGTERM).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # of a terminal or pipe whose encoding may lack `→`
        sys.stdout.reconfigure(errors="backslashreplace")
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

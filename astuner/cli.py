"""The `astuner` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from astuner.errors import AstunerError

_CONF = click.option(
    "--conf",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The YAML configuration.",
)
_BACKBONE = click.option(
    "--backbone", metavar="NAME", help="debug, local, trinity or verl; overrides astuner.backbone."
)
_EXP_DIR = click.option(
    "--exp-dir", default="launcher_record", show_default=True, metavar="DIR", help="Where run records go."
)
_OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


class _TrainByDefault(click.Group):
    """A group that takes `astuner --conf …` for `astuner train --conf …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks_for_help = bool(args) and args[0] in ("--help", "--version")
        if args and args[0] not in self.commands and not asks_for_help:
            args = ["train", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_TrainByDefault, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="astuner")
def astuner() -> None:
    """Tune the model behind an agent: your workflow, your tasks, your judge.

    `astuner --conf FILE [KEY=VALUE]…` trains; KEY is a full path such as astuner.trainer_common.optim.lr.
    """


@astuner.command()
@_CONF
@_BACKBONE
@_EXP_DIR
@_OVERRIDES
def train(conf: Path, backbone: str | None, exp_dir: str, overrides: tuple[str, ...]) -> None:
    """Tune the model (the default command)."""
    from astuner.launcher.launch import Launch

    Launch.from_yaml(conf, overrides, backbone, exp_dir).train()


@astuner.command(name="eval")
@_CONF
@click.option("--model", metavar="PATH", help="Measure this folder or hub name instead of astuner.model.path.")
@click.option("--tasks", type=click.IntRange(min=1), help="Measure the first N validation tasks only.")
@_BACKBONE
@_EXP_DIR
@_OVERRIDES
def evaluate(
    conf: Path,
    model: str | None,
    tasks: int | None,
    backbone: str | None,
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Measure a model on the validation tasks."""
    from astuner.launcher.launch import Launch

    Launch.from_yaml(conf, overrides, backbone, exp_dir).evaluate(model, tasks)


@astuner.command()
@_CONF
@click.option("--dry-run", is_flag=True, help="Also roll out a few training episodes.")
@_BACKBONE
@_EXP_DIR
@_OVERRIDES
def check(conf: Path, dry_run: bool, backbone: str | None, exp_dir: str, overrides: tuple[str, ...]) -> None:
    """Say what a run would do, and what is wrong, before it is started."""
    from astuner.launcher.check import check_launch
    from astuner.launcher.launch import Launch

    check_launch(Launch.from_yaml(conf, overrides, backbone, exp_dir), dry_run=dry_run)


def main() -> None:
    """Run the command; errors of astuner's own are printed as one message, Ctrl-C exits with 130."""
    try:
        outcome: Any = astuner.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; the same command goes on from the last checkpoint", err=True)
        sys.exit(130)
    except AstunerError as error:
        from astuner.launcher.console import print_error

        print_error(error)
        sys.exit(1)
    sys.exit(outcome if isinstance(outcome, int) else 0)

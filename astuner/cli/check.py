"""The command `astuner check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from astuner.cli.main import load_launcher
from astuner.cli.options import BACKBONE, CONF, DEBUGGER, EXP_DIR, OVERRIDES, SERVICES, SHOW, ServicesCommand

if TYPE_CHECKING:
    from astuner.viewer.transcripts import Shown


@click.command(cls=ServicesCommand)
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
    launcher = load_launcher(conf, overrides, backbone, exp_dir, services)
    from astuner.launcher.check import check_run

    check_run(launcher, dry_run=dry_run, shown=show)

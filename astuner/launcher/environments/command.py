"""What `astuner install` is asked for, as a wish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from astuner.launcher.environments.inspection import has_nvidia_gpu
from astuner.launcher.environments.install import Wish, install
from astuner.launcher.environments.recipes import Device, recipe_for
from astuner.launcher.environments.source import running_source


def install_backbone(
    backbone: str,
    device: Device | None,
    *,
    vllm: bool,
    python: str | None,
    extra: Sequence[Path],
    folder: Path | None,
    index: str,
    pip: bool,
    fresh: bool,
) -> None:
    """Make a backbone's environment, and say what is done.

    Args:
        backbone: its name.
        device: what it computes on, None for what is there.
        vllm: whether vLLM has to be in it.
        python, extra, folder, index, pip, fresh: as in `Wish`; no `extra` means as before.

    Raises:
        InstallError: whatever keeps it from being made.
    """
    recipe = recipe_for(backbone, device or ("cuda" if has_nvidia_gpu() else "cpu"), vllm=vllm)
    if device is None:
        click.echo(f"for the {'GPU' if recipe.device == 'cuda' else 'CPU'}, as detected (--cpu and --cuda choose)")
    if not recipe.ran:
        click.echo(f"note: the versions of {recipe.name} fit together by what they declare, and have not been run yet")
    files = tuple(file.absolute() for file in extra) or None
    install(Wish(recipe, running_source(), python, files, folder, index, pip, fresh), click.echo)
    click.echo(f"now: astuner --conf FILE --backbone={backbone}")

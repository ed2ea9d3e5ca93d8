"""Going on in a backbone's own environment, where this one does not suit it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from astuner.errors import InstallError
from astuner.launcher.environments.places import Place, Receipt, being_installed
from astuner.launcher.environments.recipes import recipe_named, recipes_of
from astuner.launcher.environments.source import running_source
from astuner.launcher.environments.versions import Unmet, unmet_here

_ENTERED = "ASTUNER_ENTERED_ENVIRONMENT"
"""The environment that a process was told to go on in; here again, it would go round in circles."""


def lacking_here(backbone: str) -> list[Unmet]:
    """Return what this environment lacks for a backbone; imports nothing, and is empty for one without recipes."""
    return min((unmet_here(recipe.suitable) for recipe in recipes_of(backbone)), key=len, default=[])


def enter_environment(backbone: str) -> None:
    """Go on in the backbone's environment: the same command, working directory, variables and process id.

    Returns where that is not needed: the backbone runs anywhere, or this environment has what it needs.

    Raises:
        InstallError: its environment is not installed, or broken, or has another astuner in it.
    """
    lacking = lacking_here(backbone)
    if not lacking:
        return
    place = Place.of(backbone)
    receipt = _usable(place, lacking)
    place.keep_for_running()
    if os.environ.get(_ENTERED) == str(place.folder):
        raise InstallError(
            f"the environment of {backbone}, {place.folder}, lacks {', '.join(map(str, lacking))}; "
            f"run: {install_command(backbone, fresh=True)}"
        )
    _note_if_outdated(place, receipt)
    # As if it had been activated, for programs that are started by name, such as ray.
    os.environ["VIRTUAL_ENV"] = str(place.folder)
    os.environ["PATH"] = os.pathsep.join([str(place.folder / "bin"), os.environ.get("PATH", os.defpath)])
    os.environ[_ENTERED] = str(place.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without -P, a folder named astuner in the working directory would be taken for the package.
    os.execv(place.python, [str(place.python), "-P", "-m", "astuner", *sys.argv[1:]])


def require_environment(backbone: str) -> None:
    """Check that this environment suits the backbone, where a process cannot go on in another.

    Raises:
        InstallError: it does not; says how to run there.
    """
    lacking = lacking_here(backbone)
    if lacking:
        place = Place.of(backbone)
        installed = "" if place.receipt() else f"`{install_command(backbone)}`, then "
        raise InstallError(
            f"backbone {backbone!r} needs {', '.join(map(str, lacking))}, and a Python program cannot move to another "
            f"environment: {installed}run your program with {place.python}, or write the job with dump_job_as_yaml "
            f"and run `astuner --conf FILE`, which moves by itself"
        )


def install_command(backbone: str, *, fresh: bool = False) -> str:
    """Return the command that makes a backbone's environment, as it is or was."""
    place = Place.of(backbone)
    receipt = place.receipt()
    words = ["astuner install", backbone]
    recipe = recipe_named(receipt.recipe) if receipt else None
    if recipe is not None:
        words.append(f"--{recipe.device}")
        words += ["--vllm"] if recipe.vllm and recipe.device == "cpu" and backbone == "verl" else []
    if fresh:
        words.append("--fresh")
        words += [f"--with {file}" for file in (receipt.extra if receipt else ())]
    return " ".join(words)


def _usable(place: Place, lacking: list[Unmet]) -> Receipt:
    """Return the receipt of an environment that can be entered."""
    receipt = place.receipt()
    if receipt is None:
        if place.is_being_installed():
            raise InstallError(being_installed(place))
        state = "installation was interrupted" if place.is_unfinished() else "environment is not installed"
        raise InstallError(
            f"backbone {place.backbone!r} has its own packages, and its {state}; "
            f"run: {install_command(place.backbone)}\n"
            f"  (this environment, {sys.prefix}, lacks {', '.join(map(str, lacking))})"
        )
    if not place.python.exists():
        raise InstallError(
            f"the environment of {place.backbone} has lost its Python ({place.python}); "
            f"run: {install_command(place.backbone, fresh=True)}"
        )
    source = running_source()
    if (receipt.source, receipt.version) != (source.requirement, source.version) and not _is_on_path(
        Path(source.requirement)
    ):
        raise InstallError(
            f"the environment of {place.backbone} has astuner {receipt.version} from {receipt.source}, and this is "
            f"{source.version} from {source}; to have this one there, which takes seconds, "
            f"run: {install_command(place.backbone)}"
        )
    return receipt


def _is_on_path(checkout: Path) -> bool:
    """Whether PYTHONPATH, which stays, leads to a checkout in the other environment too."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return checkout in {Path(entry).resolve() for entry in entries if entry}


def _note_if_outdated(place: Place, receipt: Receipt) -> None:
    recipe = recipe_named(receipt.recipe)
    if recipe is None or recipe.digest != receipt.digest:
        click.echo(
            f"note: the environment of {place.backbone} was made from an older lock file; "
            f"{install_command(place.backbone)} renews it",
            err=True,
        )

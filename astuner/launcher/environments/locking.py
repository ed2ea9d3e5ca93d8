"""Make the lock files anew: `python -m astuner.launcher.environments.locking [--upgrade] [NAME…]`, in a checkout.

It needs uv, which reads its own configuration for the package index. Versions in the present lock files stay where
they can; in a new one, those of constraints.txt do.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from astuner.errors import InstallError
from astuner.launcher.environments.recipes import RECIPES, Recipe, recipe_named
from astuner.launcher.environments.versions import plain_name

_PYTHON = "3.11"


def remake(recipe: Recipe, checkout: Path, *, upgrade: bool) -> None:
    """Resolve a recipe, and write its lock file.

    Args:
        recipe: what to resolve.
        checkout: astuner's own, with pyproject.toml and constraints.txt.
        upgrade: take the newest versions that fit, whatever the lock file has.

    Raises:
        InstallError: there is no uv, or the requirements contradict each other (with uv's words).
    """
    uv = shutil.which("uv")
    if uv is None:
        raise InstallError("making lock files needs uv, which is not on the PATH; run: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        wanted, overrides, resolved = (Path(folder) / name for name in ("wanted.in", "overrides.txt", "resolved.txt"))
        wanted.write_text("\n".join(recipe.requirements))
        overrides.write_text("\n".join(recipe.overrides))
        resolved.write_text("" if upgrade else _preferred(recipe, checkout))
        follows = recipe_named(recipe.follows)
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python-version", _PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--override", str(overrides), *(["--constraint", str(follows.lock)] if follows else [])]
        command += ["--output-file", str(resolved), str(wanted), str(checkout / "pyproject.toml")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise InstallError(f"{recipe.name} cannot be resolved:\n{done.stderr.strip()}")
        recipe.lock.write_text(_head(recipe) + "".join(f"{pin}\n" for pin in _kept(recipe, resolved.read_text())))


def _preferred(recipe: Recipe, checkout: Path) -> str:
    present = recipe.lock if recipe.lock.exists() else checkout / "constraints.txt"
    return present.read_text()


def _kept(recipe: Recipe, resolved: str) -> list[str]:
    left_out = {plain_name(name) for name in recipe.left_out}
    kept = []
    for line in resolved.splitlines():
        name, version = line.split("==", 1)
        if plain_name(name) not in left_out:
            # The package index chooses the build (+cpu, +cu130); doctor and install look whether it is the right one.
            kept.append(f"{name}=={version.partition('+')[0]}")
    return kept


def _head(recipe: Recipe) -> str:
    lines = [
        f"Pins of the environment {recipe.name}; made by `make locks`, not by hand.",
        f"Resolved for Python {_PYTHON} on Linux (x86_64) with astuner's own requirements and: "
        + ", ".join(recipe.requirements),
    ]
    if recipe.overrides:
        lines.append(f"In place of what packages declare: {', '.join(recipe.overrides)}")
    if recipe.left_out:
        lines.append(f"Left out: {', '.join(recipe.left_out)}")
    lines.append("Was installed and imported." if recipe.ran else "Was resolved only, and has never run.")
    return "".join(f"# {line}\n" for line in lines)


@click.command()
@click.option("--upgrade", is_flag=True, help="Take the newest versions.")
@click.argument("names", nargs=-1)
def main(upgrade: bool, names: tuple[str, ...]) -> None:
    """Make the lock files NAMES anew, or all."""
    checkout = Path(__file__).resolve().parents[3]
    for recipe in RECIPES:
        if not names or recipe.name in names:
            try:
                remake(recipe, checkout, upgrade=upgrade)
            except InstallError as error:
                sys.exit(str(error))
            click.echo(f"{recipe.lock}: {len(recipe.pins)} packages")


if __name__ == "__main__":
    main()

"""Re-execution of the command in the backbone's environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from astuner.config.loading import BackboneChoice
from astuner.errors import InstallError
from astuner.installer.env_dir import EnvDir
from astuner.installer.env_specs import env_spec_named, env_specs_of
from astuner.installer.inspection import running_source, unmet
from astuner.system.paths import installed_version

_ENTERED = "ASTUNER_ENTERED_ENVIRONMENT"
"""Variable that names the environment of the last re-execution, to prevent an endless loop."""


def missing_packages(backbone: str) -> list[str]:
    """Return the backbone's requirements that this environment does not meet; imports nothing."""
    return min(
        (unmet(spec.runtime_requirements, installed_version) for spec in env_specs_of(backbone)), key=len, default=[]
    )


def enter_environment(choice: BackboneChoice) -> None:
    """Re-execute the command in the environment of the chosen backbone.

    Command line, working directory, environment variables and process id stay the same. If this environment already
    has all that the backbone needs, the function returns without re-executing.

    Raises:
        InstallError: the environment is not installed, is broken, or has another astuner.
    """
    missing = missing_packages(choice.name)
    if not missing:
        return
    env_dir = EnvDir.of(choice.name)
    _check_usable(env_dir, missing, choice)
    env_dir.lock_for_run()
    if os.environ.get(_ENTERED) == str(env_dir.folder):
        raise InstallError(
            f"the environment of {choice.name} in {env_dir.folder} lacks {', '.join(missing)}; "
            f"run: {env_dir.install_command(fresh=True)}"
        )
    # As after activation, for programs that are started by name, such as ray.
    os.environ["VIRTUAL_ENV"] = str(env_dir.folder)
    os.environ["PATH"] = os.pathsep.join([str(env_dir.folder / "bin"), os.environ.get("PATH", os.defpath)])
    os.environ[_ENTERED] = str(env_dir.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without -P, Python would import a folder named astuner in the working directory as the package.
    os.execv(env_dir.python, [str(env_dir.python), "-P", "-m", "astuner", *sys.argv[1:]])


def check_environment(choice: BackboneChoice) -> None:
    """Check that a command can run the chosen backbone, in this environment or in that of the backbone.

    Raises:
        InstallError: the environment is not installed, is broken, or has another astuner.
    """
    if missing := missing_packages(choice.name):
        _check_usable(EnvDir.of(choice.name), missing, choice)


def require_environment(choice: BackboneChoice) -> None:
    """Check that the chosen backbone can run in this environment, for callers that cannot re-execute.

    Raises:
        InstallError: packages of the backbone are missing.
    """
    missing = missing_packages(choice.name)
    if missing:
        env_dir = EnvDir.of(choice.name)
        install = "" if env_dir.manifest() else f"run `{env_dir.install_command()}`, then "
        raise InstallError(
            f"backbone {choice.name!r} needs {', '.join(missing)}. A Python program cannot switch to another "
            f"environment: {install}run your program with {env_dir.python}, or save the job with dump_job_as_yaml and "
            f"run `astuner --conf FILE`, which switches automatically{_alternative(choice)}"
        )


def _check_usable(env_dir: EnvDir, missing: list[str], choice: BackboneChoice) -> None:
    """Check that the environment is complete and has the running astuner; warn if its lock file is outdated.

    Raises:
        InstallError: the environment is incomplete, or has another astuner.
    """
    manifest = env_dir.manifest()
    if manifest is None:
        if env_dir.is_being_installed():
            env_dir.lock_for_run()  # raises
        state = "whose installation was interrupted" if env_dir.is_incomplete() else "which is not installed"
        raise InstallError(
            f"backbone {env_dir.backbone!r} runs in a separate environment, {state}; run: {env_dir.install_command()}"
            f"{_alternative(choice)}\n  (the current environment, {sys.prefix}, lacks {', '.join(missing)})"
        )
    if not env_dir.python.exists():
        raise InstallError(
            f"the environment of {env_dir.backbone} has lost its interpreter ({env_dir.python}); "
            f"run: {env_dir.install_command(fresh=True)}"
        )
    source = running_source()
    # PYTHONPATH is inherited, so a checkout on it is used in the other environment as well.
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_on_path = Path(source.requirement) in {Path(entry).resolve() for entry in python_path if entry}
    if (manifest.source, manifest.version) != (source.requirement, source.version) and not is_on_path:
        raise InstallError(
            f"the environment of {env_dir.backbone} has astuner {manifest.version} from {manifest.source}, but this is "
            f"astuner {source.version} from {source.requirement}; to update it, which takes seconds, "
            f"run: {env_dir.install_command()}"
        )
    spec = env_spec_named(manifest.spec)
    if spec is None or spec.digest != manifest.digest:
        click.echo(
            f"note: the environment of {env_dir.backbone} was installed from an older lock file; "
            f"to update it, run: {env_dir.install_command()}",
            err=True,
        )


def _alternative(choice: BackboneChoice) -> str:
    """Return why the backbone was chosen and how to choose another one; "" if the configuration names it."""
    return (
        f"\n  (backbone auto is {choice.name}, because {choice.reason}; {choice.alternative})" if choice.reason else ""
    )

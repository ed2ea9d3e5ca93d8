"""Inspection of environments: installed packages, unmet requirements and import errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from astuner.errors import InstallError
from astuner.installer.env_specs import Device

_PROBE = Path(__file__).parent / "probe.py"
_PROBE_SECONDS = 600.0
_REDIRECTING_VARIABLES = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PIP_REQUIREMENT", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV", "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_PYTHON", "PIP_REPORT",
)  # fmt: skip


def isolated_variables() -> dict[str, str]:
    """Return the environment variables, except for those that make Python or pip use another environment.

    Variables for the package index, proxies and certificates stay.
    """
    return {name: value for name, value in os.environ.items() if name not in _REDIRECTING_VARIABLES}


def unmet(
    requirements: Iterable[str],
    version_of: Callable[[str], str | None],
    *,
    markers: Mapping[str, str] | None = None,
    ignored: Iterable[str] = (),
) -> list[str]:
    """Return the requirements that are not met, such as `verl==0.9.1 (0.8.0 is installed)`.

    Args:
        requirements: requirement lines. Lines that do not parse, or whose marker does not hold, count as met.
        version_of: returns the installed version of a package by its normalised name, None if it is not installed.
        markers: values for environment markers of another interpreter, such as python_version.
        ignored: packages to skip.
    """
    ignored_names = {canonicalize_name(name) for name in ignored}
    missing = []
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # from before PEP 508; pip skips it as well
            continue
        name = canonicalize_name(requirement.name)
        if name in ignored_names:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "", **(markers or {})}):
            continue
        version = version_of(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{name}{requirement.specifier} ({version or 'not'}{' is' if version else ''} installed)")
    return missing


def version_here(package: str) -> str | None:
    """Return the version of a package in this interpreter, None if it is not installed; does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Inspection(BaseModel):
    """Result of inspecting an environment.

    Attributes:
        python: the environment's Python version.
        prefix: the environment's folder.
        installed: version by normalised package name.
        requires: declared requirements by normalised package name.
        cuda: CUDA version that PyTorch was built for; None for a CPU build or no PyTorch.
        import_errors: the error message of each module that cannot be imported, by module name.
    """

    python: str
    prefix: str
    installed: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    cuda: str | None
    import_errors: dict[str, str]

    def conflicts(self, ignored: Iterable[str] = ()) -> list[str]:
        """Return the declared requirements that are not met, except those on `ignored` packages."""
        markers = {"python_version": ".".join(self.python.split(".")[:2]), "python_full_version": self.python}
        return [
            f"{name} {self.installed[name]} needs {requirement}"
            for name, requirements in sorted(self.requires.items())
            for requirement in unmet(requirements, self.installed.get, markers=markers, ignored=ignored)
        ]

    def wrong_torch_build(self, device: Device) -> str | None:
        """Return a description of the mismatch if PyTorch is not built for `device`, else None."""
        torch = self.installed.get("torch")
        if torch is None or (self.cuda is not None) == (device == "cuda"):
            return None
        if self.cuda is None:
            return f"torch {torch} is built without CUDA, but the environment is for CUDA"
        return f"torch {torch} is built for CUDA {self.cuda}, but the environment is for the CPU"


def inspect(python: Path | str, imports: Iterable[str] = (), *, isolated: bool = True) -> Inspection:
    """Inspect the environment of an interpreter.

    Args:
        python: the interpreter.
        imports: modules to import. `name?` is skipped if it is not installed.
        isolated: ignore this process's PYTHONPATH and the user's site-packages.

    Raises:
        InstallError: the interpreter does not run, or crashes.
    """
    variables = isolated_variables() if isolated else None
    command = [str(python), "-P", *(["-s"] if isolated else []), str(_PROBE), *imports]
    try:
        probe = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
        result = json.loads(probe.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"the interpreter {python} cannot be started: {error}") from error
    except ValueError as error:
        raise InstallError(
            f"{python} crashed with exit code {probe.returncode} while importing {', '.join(imports) or 'nothing'}"
        ) from error
    for key in ("installed", "requires"):
        result[key] = {canonicalize_name(name): value for name, value in result[key].items()}
    return Inspection(**result)

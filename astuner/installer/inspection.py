"""Inspection of environments: installed packages, unmet requirements and import errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

import astuner
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


class Inspection(BaseModel):
    """Result of inspecting an environment.

    Attributes:
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


@dataclass(frozen=True)
class Source:
    """A source that pip can install astuner from.

    Attributes:
        requirement: requirement for pip: a checkout's folder, `astuner==1.2.3` or `astuner @ https://…`.
        editable: whether it is a checkout, which is installed in editable mode.
        version: astuner's version.
    """

    requirement: str
    editable: bool
    version: str

    @property
    def pip_arguments(self) -> list[str]:
        """Arguments of `pip install` that install it."""
        # An isolated build would download setuptools, which the lock files include.
        return ["--no-build-isolation", "--editable", self.requirement] if self.editable else [self.requirement]


def running_source() -> Source:
    """Return the source of the running astuner.

    Raises:
        InstallError: it is neither a checkout nor an installed package, or it was installed from a deleted file.
    """
    folder, project = _checkout()
    if project:
        return Source(str(folder), editable=True, version=str(project["version"]))
    try:
        distribution = importlib.metadata.distribution("astuner")
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(
            f"astuner runs from {folder}, which is neither a checkout (no pyproject.toml) nor an installed package, so "
            "it cannot be installed in another environment; install it first: pip install astuner"
        ) from None
    version = distribution.version
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")  # PEP 610
    if not origin:
        return Source(f"astuner=={version}", editable=False, version=version)
    url = str(origin["url"])
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    elif (parts := urlsplit(url)).scheme == "file" and not Path(unquote(parts.path)).exists():
        raise InstallError(
            f"astuner was installed from {unquote(parts.path)}, which no longer exists, so it cannot be installed in "
            "another environment; reinstall it from a file or checkout that you keep"
        )
    return Source(f"astuner @ {url}", editable=False, version=version)


def astuner_requirements() -> list[str]:
    """Return astuner's own requirements, without extras."""
    _, project = _checkout()
    if project:
        return [str(line) for line in project["dependencies"]]
    return [line for line in importlib.metadata.requires("astuner") or [] if "extra ==" not in line]


def _checkout() -> tuple[Path, dict[str, Any]]:
    """Return the folder that holds the running package, and its project table if it is a checkout."""
    folder = Path(astuner.__file__).resolve().parents[1]
    file = folder / "pyproject.toml"
    project: dict[str, Any] = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    return folder, project if project.get("name") == "astuner" else {}

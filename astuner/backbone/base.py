"""What a backbone is, and finding one by name."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from astuner.backbone.progress import RunProgress
from astuner.config.root import AstunerConfig, RunConfig
from astuner.errors import BackboneError
from astuner.run_record import RunRecord, RunSummary
from astuner.schema import Episode


@dataclass(frozen=True)
class RunContext:
    """What a backbone is given.

    Attributes:
        config: the whole configuration, resolved.
        config_dir: the folder of the YAML, against which relative paths resolve after the working directory.
        record: where the run leaves what it did.
        progress: shows how far each phase is.
        started: when the process started, seconds since the epoch.
    """

    config: RunConfig
    config_dir: Path
    record: RunRecord
    progress: RunProgress
    started: float

    @property
    def search(self) -> tuple[Path, ...]:
        """Where `package.module->Class` is looked for before installed modules."""
        return (Path.cwd(), self.config_dir)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run takes at its peak, by what they are for, and what the device has.

    Attributes:
        parameters: number of weights.
        trained: how many of them are trained.
        parts: bytes, by name.
        available: bytes of the device.
    """

    parameters: int
    trained: int
    parts: dict[str, int]
    available: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


class Backbone(Protocol):
    """Runs episodes and, but for debug, moves weights."""

    def train(self, context: RunContext) -> RunSummary:
        """Do the whole run; what it leaves is in `context.record`."""
        ...

    def evaluate(self, context: RunContext, model: str | None, tasks: int | None) -> RunSummary:
        """Only validate.

        Args:
            context: the run.
            model: the model to measure instead of `model.path`.
            tasks: measure the first so many validation tasks only.
        """
        ...

    def dry_run(self, context: RunContext) -> list[Episode]:
        """Roll out `debug.debug_first_n_tasks` training tasks as a step would, and train on nothing."""
        ...

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate:
        """Estimate the memory of a run, without loading weights."""
        ...


@dataclass(frozen=True)
class _Home:
    path: str
    needs: tuple[str, ...] = ()
    extra: str = ""


_BACKBONES = {"local": _Home("astuner.backbone.local.backbone->LocalBackbone", ("torch", "transformers", "peft"))}
_PLANNED = ("debug", "trinity", "verl")


def load_backbone(name: str) -> Backbone:
    """Return the backbone of that name.

    Raises:
        BackboneError: it is unknown, or its packages are missing (with the command that installs them).
    """
    if name in _PLANNED:
        raise BackboneError(
            f"backbone {name!r} is not part of this version yet; use one of: {', '.join(sorted(_BACKBONES))}"
        )
    if name not in _BACKBONES:
        raise BackboneError(f"unknown backbone {name!r}; there are: {', '.join(sorted(_BACKBONES))}")
    home = _BACKBONES[name]
    missing = [package for package in home.needs if importlib.util.find_spec(package) is None]
    if missing:
        target = f'"astuner[{home.extra}]"' if home.extra else "astuner"
        raise BackboneError(
            f"backbone {name!r} needs {', '.join(missing)}, not installed here; run: pip install {target}"
        )
    module, _, class_name = home.path.partition("->")
    backbone: Backbone = getattr(importlib.import_module(module), class_name)()
    return backbone

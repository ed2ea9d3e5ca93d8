"""What a backbone is, and finding one by name."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from astuner.backbone.cluster.head import StartedRay, is_own_ray
from astuner.backbone.ingredients import Ingredients
from astuner.backbone.phases import PhaseName, watched
from astuner.backbone.progress import RunProgress
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig, starts_vllm
from astuner.errors import BackboneError
from astuner.run_record import RunRecord, RunSummary
from astuner.schema import Episode
from astuner.task_rollout import RunningEpisodes, Split


@dataclass(frozen=True)
class RunContext:
    """What a backbone is given.

    Attributes:
        config: the whole configuration, resolved.
        ingredients: what the user brought, loaded and checked.
        record: where the run leaves what it did.
        progress: shows how far each phase is.
        started: when the process started, seconds since the epoch.
        running: knows the episodes that run, for whoever asks while they do.
        keep_engine: leave a server that the run starts for its engine warm.
        on_episode: called on the main thread with each episode of a dry run as it ends.
        origins: where the user set a key (`file:line`, `command line`), for messages.
        ray: that `--with-ray` or `--with-ray-cluster` has started, for backbones that compute on one.
    """

    config: RunConfig
    ingredients: Ingredients
    record: RunRecord
    progress: RunProgress
    started: float
    running: RunningEpisodes
    keep_engine: bool = False
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    on_episode: Callable[[Episode], None] = lambda _: None
    ray: StartedRay | None = None

    @property
    def has_own_ray(self) -> bool:
        """Whether the Ray that a backbone computes on is the run's own, and on this machine alone."""
        return is_own_ray(self.config.astuner.trainer_common.ray_address, self.ray)

    @property
    def prospect(self) -> Prospect:
        """The run as it was before its record was opened."""
        return Prospect(self.config, self.ingredients, self.record.folder, self.origins, self.ray)

    def phase(self, name: PhaseName) -> contextlib.AbstractContextManager[None]:
        """Have the log say where things stand if the block, a phase of the run, passes its deadline."""
        return watched(name, self.config.astuner.deadlines, self.running)


@dataclass(frozen=True)
class Prospect:
    """A run before its record is opened.

    Attributes:
        config, ingredients, origins, ray: as in `RunContext`.
        folder: where its record will be.
        trains: whether it is to move weights.
    """

    config: RunConfig
    ingredients: Ingredients
    folder: Path
    origins: Mapping[KeyPath, str]
    ray: StartedRay | None
    trains: bool = True


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
    """Runs episodes."""

    def refuse(self, prospect: Prospect) -> None:
        """Find what this backbone cannot run, beyond what the configuration's own checks know.

        Raises:
            AstunerError: it cannot run this, with the mend.
        """
        ...

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out `debug.debug_first_n_tasks` tasks as a step or a validation would, and train on nothing."""
        ...

    def estimate(self, config: AstunerConfig, model_path: str) -> MemoryEstimate | None:
        """Estimate the memory of a run, without loading weights; None where the model is not in this process."""
        ...


class TrainingBackbone(Backbone, Protocol):
    """Runs episodes and moves weights."""

    def train(self, context: RunContext) -> RunSummary:
        """Do the whole run; what it leaves is in `context.record`."""
        ...

    def evaluate(self, context: RunContext) -> RunSummary:
        """Only validate."""
        ...


@dataclass(frozen=True)
class _Home:
    path: str
    needs: tuple[str, ...]
    trains: bool
    install: str = "pip install astuner"


_BACKBONES = {
    "debug": _Home("astuner.backbone.debug.backbone->DebugBackbone", ("torch", "transformers"), trains=False),
    "local": _Home("astuner.backbone.local.backbone->LocalBackbone", ("torch", "transformers", "peft"), trains=True),
    "verl": _Home(
        "astuner.backbone.verl.backbone->VerlBackbone",
        ("verl", "transfer_queue", "ray"),
        trains=True,
        install="astuner install verl",
    ),
    "trinity": _Home(
        "astuner.backbone.trinity.backbone->TrinityBackbone",
        ("trinity", "tinker", "ray"),
        trains=True,
        install="astuner install trinity",
    ),
}


def load_training_backbone(name: str) -> TrainingBackbone:
    """Return the backbone of that name, which trains.

    Raises:
        BackboneError: it does not, it is unknown, or its packages are missing.
    """
    if name in _BACKBONES and not _BACKBONES[name].trains:
        trainers = ", ".join(sorted(name for name, home in _BACKBONES.items() if home.trains))
        raise BackboneError(
            f"backbone {name!r} rolls out episodes and has no trainer, so it neither tunes nor measures a model: use "
            f"another one for that ({trainers}), or roll out with `astuner --conf FILE --backbone={name}`"
        )
    return cast(TrainingBackbone, load_backbone(name))


def load_backbone(name: str) -> Backbone:
    """Return the backbone of that name.

    Raises:
        BackboneError: it is unknown, or its packages are missing (with the command that installs them).
    """
    if name not in _BACKBONES:
        raise BackboneError(f"unknown backbone {name!r}; there are: {', '.join(sorted(_BACKBONES))}")
    home = _BACKBONES[name]
    missing = [package for package in home.needs if not _is_installed(package)]
    if missing:
        raise BackboneError(f"backbone {name!r} needs {', '.join(missing)}, not installed here; run: {home.install}")
    module, _, class_name = home.path.partition("->")
    backbone: Backbone = getattr(importlib.import_module(module), class_name)()
    return backbone


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Import without the cyclic garbage collector, and spare it what was imported.

    PyTorch, transformers and agents' frameworks bring half a million objects, which stay. To look through all of them
    again and again takes a fifth of the time to start, and half a second whenever it happens later.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def check_engine(config: AstunerConfig) -> None:
    """Check, before anything is loaded, that the engine's packages are installed and get along.

    Raises:
        BackboneError: they are not; says what to run.
    """
    from astuner.backbone.vllm_server.installed import installed_vllm, refuse_strangers

    refuse_strangers(for_vllm=starts_vllm(config))
    if starts_vllm(config):
        installed_vllm()


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A mere folder of that name in the working directory has no origin.
    return spec is not None and spec.origin is not None

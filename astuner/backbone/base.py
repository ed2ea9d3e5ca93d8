"""The interface of a backbone, its inputs, and loading a backbone by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from astuner.backbone.training.progress import PhaseName, RunProgress, warn_if_slow
from astuner.backbone.training.run_inputs import RunInputs
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig, RunConfig
from astuner.doors import through_door
from astuner.errors import BackboneError
from astuner.run_record.record import RunRecord
from astuner.run_record.summary import RunSummary
from astuner.schema import Episode, Split
from astuner.system.paths import is_installed
from astuner.task_rollout.active_episodes import ActiveEpisodes

if TYPE_CHECKING:
    from astuner.diagnostics.monitor import Monitor


@dataclass(frozen=True, slots=True)
class StartedRay:
    """A Ray instance that was started as a service of the run.

    Attributes:
        address: `host:port` of its head, on this machine.
        others_join: whether nodes on other machines may join.
    """

    address: str
    others_join: bool


def is_own_ray(address: str | None, started: StartedRay | None) -> bool:
    """Return whether a run with this `ray_address` starts its own Ray instance and uses this machine only."""
    return address is None and (started is None or not started.others_join)


@dataclass(frozen=True)
class RunContext:
    """Inputs of a backbone run.

    Attributes:
        started: when the process started, as a `timestamp`.
        monitor: looks for faults in the episodes and updates.
        keep_engine: whether the inference server that the run starts keeps running after the run.
        on_episode: called on the main thread with each finished episode of a dry run.
        origins: where the user set a key (`file:line`, `command line`), for messages.
        ray: the Ray cluster that `--with-ray` or `--with-ray-cluster` started, if any.
    """

    config: RunConfig
    run_inputs: RunInputs
    record: RunRecord
    progress: RunProgress
    started: float
    active_episodes: ActiveEpisodes
    monitor: Monitor
    keep_engine: bool = False
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    on_episode: Callable[[Episode], None] = lambda _: None
    ray: StartedRay | None = None

    @property
    def has_own_ray(self) -> bool:
        """Whether the run starts Ray on this machine, instead of connecting to a running Ray."""
        return is_own_ray(self.config.astuner.trainer_common.ray_address, self.ray)

    @property
    def preflight_context(self) -> PreflightContext:
        """The inputs of this run's preflight."""
        return PreflightContext(self.config, self.run_inputs, self.record.folder, self.origins, self.ray)

    def phase(self, name: PhaseName) -> contextlib.AbstractContextManager[None]:
        """Log a warning if the block, a phase of the run, passes its deadline."""
        return warn_if_slow(name, self.config.astuner.deadlines, self.active_episodes)


@dataclass(frozen=True)
class PreflightContext:
    """Inputs of a preflight, which runs before the run record is opened.

    Attributes:
        config, run_inputs, origins, ray: as in `RunContext`.
        folder: the folder of the run record.
        trains: whether the run trains; False for an evaluation or a dry run.
    """

    config: RunConfig
    run_inputs: RunInputs
    folder: Path
    origins: Mapping[KeyPath, str]
    ray: StartedRay | None
    trains: bool = True


@dataclass(frozen=True)
class MemoryPart:
    """One use of memory, in bytes; `fix` names the configuration keys that make it smaller."""

    name: str
    size: int
    fix: str


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak memory of a run.

    Attributes:
        parameters: number of weights; 0 if the model is in other processes.
        trained: number of trained weights.
        phases: the parts of the memory that the process holds in each phase of a step.
        available: bytes of the device.
        excluded: processes that the estimate does not cover; "" for none.
        device: the device, for messages; "" for that of this process.
        host: bytes of a machine's main memory for what is offloaded from its GPUs.
        problems: what does not fit although the total does, and the keys that change it.
    """

    parameters: int
    trained: int
    phases: Mapping[str, tuple[MemoryPart, ...]]
    available: int
    excluded: str = ""
    device: str = ""
    host: int = 0
    problems: tuple[str, ...] = ()

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(part.size for part in self.phases[phase]))

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The parts of the memory that the process holds at the peak."""
        return self.phases[self.peak]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(part.size for part in self.parts)


class Backbone(Protocol):
    """Rolls out episodes."""

    def check_config(
        self, config: RunConfig, origins: Mapping[KeyPath, str], ray: StartedRay | None, *, trains: bool
    ) -> None:
        """Check what needs only the configuration and this machine, before services such as Ray start.

        The arguments are as in `RunContext`. AstunerError: the backbone cannot run the configuration; the
        message explains how to fix it.
        """
        ...

    def preflight(self, preflight_context: PreflightContext) -> None:
        """Check, without starting anything, that this backbone can run the configuration.

        The checks of the configuration itself are done before.

        Raises:
            AstunerError: the backbone cannot run the configuration. The message explains how to fix it.
        """
        ...

    def dry_run(self, context: RunContext, split: Split) -> list[Episode]:
        """Roll out `debug.debug_first_n_tasks` tasks as a training step or a validation would, without training."""
        ...

    def estimate(self, config: AstunerConfig, run_inputs: RunInputs) -> MemoryEstimate:
        """Estimate the memory of a run without loading weights."""
        ...


class TrainingBackbone(Backbone, Protocol):
    """Rolls out episodes and trains."""

    def train(self, context: RunContext) -> RunSummary:
        """Do the whole run and write its results to `context.record`."""
        ...

    def evaluate(self, context: RunContext) -> RunSummary:
        """Validate the model without training."""
        ...


@dataclass(frozen=True)
class BackboneSpec:
    """What a backbone requires; its class is in `DOORS`.

    Attributes:
        trains: whether it is a `TrainingBackbone`.
        install: the command that installs the packages.
    """

    needs: tuple[str, ...]
    trains: bool
    install: str = "pip install astuner"


_BACKBONES = {
    "debug": BackboneSpec(("torch", "transformers"), trains=False),
    "local": BackboneSpec(("torch", "transformers", "peft"), trains=True),
    "verl": BackboneSpec(("verl", "transfer_queue", "ray"), trains=True, install="astuner install verl"),
    "trinity": BackboneSpec(("trinity", "tinker", "ray"), trains=True, install="astuner install trinity"),
}


def load_training_backbone(name: str) -> TrainingBackbone:
    """Return the training backbone `name`; raise BackboneError if it is unknown, has no trainer, or lacks packages."""
    if name in _BACKBONES and not _BACKBONES[name].trains:
        trainers = ", ".join(sorted(other for other, spec in _BACKBONES.items() if spec.trains))
        raise BackboneError(
            f"backbone {name!r} has no trainer, so it can neither train nor evaluate a model; use {trainers} for that, "
            f"or roll out episodes with `astuner --conf FILE --backbone={name}`"
        )
    return cast(TrainingBackbone, load_backbone(name))


def load_backbone(name: str) -> Backbone:
    """Return the backbone `name`. BackboneError: it is unknown, or lacks packages; the message says how to install."""
    if name not in _BACKBONES:
        raise BackboneError(f"unknown backbone {name!r}; choose one of {', '.join(sorted(_BACKBONES))}")
    spec = _BACKBONES[name]
    missing = [package for package in spec.needs if not is_installed(package)]
    if missing:
        raise missing_packages(name, missing)
    backbone: Backbone = through_door("backbone", name)()
    return backbone


def missing_packages(name: str, packages: Sequence[str]) -> BackboneError:
    """Return the error for packages that backbone `name` needs and that are not installed."""
    verb, command = "is" if len(packages) == 1 else "are", _BACKBONES[name].install
    return BackboneError(f"backbone {name!r} needs {', '.join(packages)}, which {verb} not installed; run: {command}")

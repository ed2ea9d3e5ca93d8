"""What samples and trains under Trinity: a Tinker service, or vLLM and verl's workers on GPUs of their own.

Trinity has both behind the same explorer and trainer; what it leaves to others differs, and is here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from astuner.backbone.trinity.plan import Device
from astuner.backbone.trinity.tinker_process import TinkerServer
from astuner.backbone.trinity.tinker_service import KEY_VARIABLE, TinkerService
from astuner.backbone.trinity.without_vllm import FOLDER as WITHOUT_VLLM
from astuner.backbone.trinity.without_vllm import stand_in

_SAVED = "remote_checkpoint_path.txt"
_ACTOR = "actor"
# Trinity's mark of a folder that is more than weights for the sampler.
_WHOLE = ".full_checkpoint"


class Side(Protocol):
    """What of a run depends on what samples and trains. A `place` is Trinity's folder of a step of its trainer's."""

    @property
    def device(self) -> Device:
        """What is computed on here."""

    @property
    def service(self) -> str | None:
        """The address of the Tinker service; None for vLLM and verl's workers."""

    @property
    def environment(self) -> Mapping[str, str]:
        """For all processes of the run."""

    @property
    def packages(self) -> list[str]:
        """Folders in which the run's processes look for packages first."""

    @property
    def for_ray(self) -> Mapping[str, str]:
        """Of Ray's runtime environment, beside variables."""

    def before_import(self) -> None:
        """Get this process ready to import Trinity."""

    def trainer_class(self) -> Any:
        """Return Trinity's `Trainer`, or a class derived of it."""

    def wait_until_served(self, patience: float) -> None:
        """Wait until it can be asked."""

    def refuse_ended(self) -> None:
        """Make sure that it lives, where nobody else would see that it does not."""

    def saved(self, place: Path) -> str | None:
        """Return where the weights are that were saved in `place`; None where none were."""

    def keep(self, weights: str, checkpoint: Path) -> str:
        """Keep weights with a checkpoint of the run's; return what `put_back` needs, beside the checkpoint."""

    def put_back(self, kept: str, checkpoint: Path, place: Path) -> None:
        """Have the trainer find kept weights in `place`."""

    def forget(self, kept: Collection[str]) -> None:
        """Remove what was kept with checkpoints that are no more."""

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Write the model of weights as a Hugging Face folder, adapters merged into `base`."""


@dataclass(frozen=True)
class TinkerSide:
    """A server of the run's own, or a service that the user names.

    Attributes:
        server: the one or the other.
        device: what is computed on here.
    """

    server: TinkerServer | TinkerService
    device: Device = "cpu"

    # What each of these is for stands in `Side`.
    # ruff: noqa: D102

    @property
    def service(self) -> str:
        return self.server.url

    @property
    def environment(self) -> Mapping[str, str]:
        return {KEY_VARIABLE: self.server.key}

    @property
    def packages(self) -> list[str]:
        return [str(WITHOUT_VLLM)]

    @property
    def for_ray(self) -> Mapping[str, str]:
        return {}

    def before_import(self) -> None:
        stand_in()

    def trainer_class(self) -> Any:
        from trinity.trainer.trainer import Trainer

        return Trainer

    def wait_until_served(self, patience: float) -> None:
        self.server.wait_until_served(patience)

    def refuse_ended(self) -> None:
        self.server.refuse_ended()

    def saved(self, place: Path) -> str | None:
        file = place / _SAVED
        return file.read_text().strip() if file.is_file() else None

    def keep(self, weights: str, checkpoint: Path) -> str:
        return weights

    def put_back(self, kept: str, checkpoint: Path, place: Path) -> None:
        place.mkdir(parents=True)
        (place / _WHOLE).touch()
        (place / _SAVED).write_text(kept)

    def forget(self, kept: Collection[str]) -> None:
        self.server.forget(kept)

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        self.server.save_model(base, weights, folder)


@dataclass(frozen=True)
class VerlSide:
    """vLLM's engines and verl's workers, all in Trinity's hands; the workers write their parts to disk.

    Attributes:
        device: what is computed on here.
    """

    device: Device = "cuda"
    service: None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)

    @property
    def for_ray(self) -> Mapping[str, str]:
        return {"worker_process_setup_hook": "astuner.backbone.trinity.children.name_the_ray"}

    def before_import(self) -> None:
        pass

    def trainer_class(self) -> Any:
        from astuner.backbone.trinity.verl_batches import WholeBatchTrainer

        return WholeBatchTrainer

    def wait_until_served(self, patience: float) -> None:
        pass

    def refuse_ended(self) -> None:
        pass

    def saved(self, place: Path) -> str | None:
        # The mark comes before the workers begin to write, and the tokenizer's folder once they have written.
        actor = place / _ACTOR
        return str(actor) if (place / _WHOLE).exists() and (actor / "huggingface").is_dir() else None

    def keep(self, weights: str, checkpoint: Path) -> str:
        actor = Path(weights)
        # Trinity writes each file once, so that the checkpoint can have the very file.
        shutil.copytree(actor, checkpoint / _ACTOR, copy_function=os.link)
        places = actor.parent.parent.glob("global_step_*")
        done = sorted((number(one), one) for one in places if number(one) < number(actor.parent))
        # The last one before this may be what the sampler still takes.
        for _, one in done[:-1]:
            shutil.rmtree(one, ignore_errors=True)
        return _ACTOR

    def put_back(self, kept: str, checkpoint: Path, place: Path) -> None:
        # A copy: the workers would write over the checkpoint's own files.
        shutil.copytree(checkpoint / kept, place / _ACTOR)
        (place / _WHOLE).touch()

    def forget(self, kept: Collection[str]) -> None:
        pass

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        from astuner.backbone.trinity.verl_model import save_model

        save_model(base, Path(weights), folder)


def number(place: Path) -> int:
    """Return the number of the trainer's step whose folder it is."""
    return int(place.name.rpartition("_")[2])

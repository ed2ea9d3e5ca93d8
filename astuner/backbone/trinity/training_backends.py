"""The two training backends under Trinity: a Tinker service, or vLLM and verl's workers on GPUs.

Trinity runs the same explorer and trainer for both. This module contains the differences.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.backbone.trinity.placement import keep_all_here, keep_unplaced_here, set_up_gpu_worker
from astuner.backbone.trinity.rules import Device
from astuner.backbone.trinity.vllm_stub import STUB_FOLDER, import_vllm_stub

KEY_VARIABLE = "TINKER_API_KEY"
POLICY_VARIABLE = "ASTUNER_TINKER_POLICY"
"""The environment variable with the `TinkerPolicy` of the run as JSON, for Trinity's trainer."""
_SETUP_HOOK = "worker_process_setup_hook"
_TINKER_PATH_FILE = "remote_checkpoint_path.txt"
_ACTOR = "actor"
# Trinity creates this file in folders that contain more than weights for the sampler.
_FULL_CHECKPOINT = ".full_checkpoint"


class TrainingBackend(ABC):
    """Samples and trains for Trinity. A `step_folder` is Trinity's checkpoint folder of one trainer step.

    Attributes:
        device: the device that the model is trained on.
    """

    device: Device

    @property
    def tinker_url(self) -> str | None:
        """The address of the Tinker service; None for vLLM and verl."""
        return None

    @property
    def takes_policy(self) -> bool:
        """Whether a Tinker service takes a `TinkerPolicy`; vLLM and verl need none."""
        return True

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for all processes of the run."""
        return {}

    @property
    def python_path(self) -> list[str]:
        """Folders at the start of the processes' PYTHONPATH."""
        return []

    @property
    @abstractmethod
    def ray_runtime_env(self) -> Mapping[str, str]:
        """Entries of Ray's runtime environment, except for environment variables."""

    @abstractmethod
    def keep_actors_here(self) -> Callable[[], None]:
        """Start Trinity's actors on this node if they can run on any node; return a function that undoes this."""

    @abstractmethod
    def trainer_class(self) -> Any:
        """Return Trinity's `Trainer` or a subclass."""

    @abstractmethod
    def saved_weights(self, step_folder: Path) -> str | None:
        """Return the location of the weights that a step has saved; None if it has not."""

    @abstractmethod
    def store_weights(self, weights: str, checkpoint: Path) -> str:
        """Store weights with a checkpoint of the run; return the reference that `restore_weights` takes."""

    @abstractmethod
    def restore_weights(self, reference: str, checkpoint: Path, step_folder: Path) -> None:
        """Recreate a step folder, from which Trinity's trainer resumes."""

    @abstractmethod
    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Write weights as a Hugging Face folder, with adapters merged into `base`."""

    # By default, nothing is to do.

    def prepare_imports(self) -> None:  # noqa: B027
        """Prepare this process for importing Trinity."""

    def wait_until_ready(self, timeout: float) -> None:  # noqa: B027
        """Wait up to `timeout` seconds until the backend accepts requests."""

    def check_alive(self) -> None:  # noqa: B027
        """Raise if a process of this backend has died and Trinity does not report it."""

    def delete_weights(self, references: Collection[str]) -> None:  # noqa: B027
        """Delete stored weights of removed checkpoints."""


# The methods below are documented in `TrainingBackend`.
# ruff: noqa: D102


@dataclass(frozen=True)
class TinkerTrainingBackend(TrainingBackend):
    """Samples and trains with a Tinker service; its subclasses are in `tinker_service`.

    Attributes:
        policy: how the server's models compute; only astuner's own server supports other values than the defaults.
        device: the device of this machine's processes.
    """

    url: str
    key: str
    takes_policy: bool = False
    policy: TinkerPolicy = field(default_factory=TinkerPolicy)
    device: Device = "cpu"

    @property
    def tinker_url(self) -> str:
        return self.url

    @property
    def environment(self) -> Mapping[str, str]:
        return {KEY_VARIABLE: self.key, POLICY_VARIABLE: self.policy.model_dump_json()}

    @property
    def python_path(self) -> list[str]:
        return [str(STUB_FOLDER)]

    @property
    def ray_runtime_env(self) -> Mapping[str, str]:
        return {_SETUP_HOOK: f"{keep_all_here.__module__}.{keep_all_here.__name__}"}

    def keep_actors_here(self) -> Callable[[], None]:
        return keep_all_here()

    def prepare_imports(self) -> None:
        import_vllm_stub()

    def trainer_class(self) -> Any:
        if self.policy == TinkerPolicy():
            from trinity.trainer.trainer import Trainer

            return Trainer
        from astuner.backbone.trinity.tinker_trainer import PolicyTrainer

        return PolicyTrainer

    def saved_weights(self, step_folder: Path) -> str | None:
        file = step_folder / _TINKER_PATH_FILE
        return file.read_text().strip() if file.is_file() else None

    def store_weights(self, weights: str, checkpoint: Path) -> str:
        return weights

    def restore_weights(self, reference: str, checkpoint: Path, step_folder: Path) -> None:
        step_folder.mkdir(parents=True)
        (step_folder / _FULL_CHECKPOINT).touch()
        (step_folder / _TINKER_PATH_FILE).write_text(reference)


@dataclass(frozen=True)
class VerlTrainingBackend(TrainingBackend):
    """Samples with vLLM and trains with verl's FSDP workers, which write sharded checkpoints."""

    device: Device = "cuda"

    @property
    def ray_runtime_env(self) -> Mapping[str, str]:
        return {_SETUP_HOOK: f"{set_up_gpu_worker.__module__}.{set_up_gpu_worker.__name__}"}

    def keep_actors_here(self) -> Callable[[], None]:
        return keep_unplaced_here()

    def trainer_class(self) -> Any:
        from astuner.backbone.trinity.verl_trainer import WholeBatchTrainer

        return WholeBatchTrainer

    def saved_weights(self, step_folder: Path) -> str | None:
        # Trinity creates the marker before the workers start to write, and the tokenizer's folder after they finish.
        actor = step_folder / _ACTOR
        is_complete = (step_folder / _FULL_CHECKPOINT).exists() and (actor / "huggingface").is_dir()
        return str(actor) if is_complete else None

    def store_weights(self, weights: str, checkpoint: Path) -> str:
        actor = Path(weights)
        # Hard links are safe: the trainer never rewrites a file.
        shutil.copytree(actor, checkpoint / _ACTOR, copy_function=os.link)
        step_folders = actor.parent.parent.glob("global_step_*")
        earlier = sorted((step_of(path), path) for path in step_folders if step_of(path) < step_of(actor.parent))
        # The sampler may still load the previous step.
        for _, path in earlier[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        return _ACTOR

    def restore_weights(self, reference: str, checkpoint: Path, step_folder: Path) -> None:
        # Copied, not linked: the workers overwrite these files.
        shutil.copytree(checkpoint / reference, step_folder / _ACTOR)
        (step_folder / _FULL_CHECKPOINT).touch()

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        from astuner.backbone.trinity.verl_trainer import save_model

        save_model(base, Path(weights), folder)


def step_of(step_folder: Path) -> int:
    """Return the trainer step of a step folder."""
    return int(step_folder.name.rpartition("_")[2])

"""Checkpoints of verl's workers. A checkpoint folder is written atomically."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from astuner.backbone.training.checkpoints import CheckpointFolder, unreadable
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.errors import RecordError, first_line

_STATE = "progress.json"
_ACTOR = "actor"
_MODEL = "model"
_WORKERS = "workers"


class VerlCheckpoints:
    """The checkpoints of a run.

    Each folder, such as `checkpoints/step_000020/`, holds verl's own checkpoint in `actor/`, the Hugging Face model in
    `model/`, and the run's state in `progress.json`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`, and keep the newest `keep` checkpoints."""
        self._folder = CheckpointFolder(folder, keep)

    def save(
        self, step: int, trainer: VerlTrainer, save_model: Callable[[Path], None], progress: dict[str, Any]
    ) -> Path:
        """Write a checkpoint and return its folder.

        Args:
            step: number of finished training steps.
            trainer: the trainer whose workers write the checkpoint.
            save_model: function that writes the Hugging Face model to a folder.
            progress: further JSON-serialisable state that a resumed run needs.

        Raises:
            RecordError: writing failed. Earlier checkpoints are untouched.
        """

        def write_files(folder: Path) -> None:
            try:
                trainer.save(folder / _ACTOR, step)
                save_model(folder / _MODEL)
            except RayError as error:
                raise OSError(first_line(error)) from error
            (folder / _STATE).write_text(json.dumps({**progress, "step": step, _WORKERS: trainer.processes}))

        return self._folder.write(step, write_files)

    def load(self, trainer: VerlTrainer) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its progress, including `step`; return None if there is none.

        Raises:
            RecordError: the checkpoint cannot be read, or was written by a different number of workers.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _STATE).read_text())
            workers = progress.pop(_WORKERS, trainer.processes)
            if workers != trainer.processes:
                raise RecordError(
                    f"the checkpoint {newest} was written by {workers} training workers, each of which wrote a part; "
                    f"this run has {trainer.processes}. Set trainer_common.n_gpus_per_node × nnodes to {workers} to "
                    "resume from it, or trainer_common.resume: false to start from scratch. The checkpoint is intact"
                )
            trainer.load(newest / _ACTOR)
        except (RayError, OSError, ValueError, TypeError, AttributeError) as error:
            raise unreadable(newest, first_line(error)) from error
        self._folder.remove_old()
        return progress

"""Checkpoints of verl's workers, written by verl's own manager into folders that are whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from astuner.backbone.checkpoint_folder import CheckpointFolder, unreadable
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.errors import RecordError
from astuner.model_tuner import first_line

_STATE = "progress.json"
_ACTOR = "actor"
_MODEL = "model"
_WORKERS = "workers"


class VerlCheckpoints:
    """`checkpoints/step_000020/` holds verl's `actor/`, the tuned `model/`, and the run's `progress.json`."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`; older checkpoints beyond `keep` are removed."""
        self._folder = CheckpointFolder(folder, keep, _STATE)

    def save(
        self, step: int, trainer: VerlTrainer, save_model: Callable[[Path], None], progress: dict[str, Any]
    ) -> Path:
        """Write the checkpoint of `step` and return its folder.

        Args:
            step: finished training steps.
            trainer: whose workers write.
            save_model: writes a Hugging Face folder.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """

        def fill(folder: Path) -> None:
            try:
                trainer.save(folder / _ACTOR, step)
                save_model(folder / _MODEL)
            except RayError as error:
                raise OSError(first_line(error)) from error
            (folder / _STATE).write_text(json.dumps({**progress, "step": step, _WORKERS: trainer.processes}))

        return self._folder.write(step, fill)

    def load(self, trainer: VerlTrainer) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress (with `step`), or None where there is none.

        Raises:
            RecordError: it cannot be read, or was made with another number of workers.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _STATE).read_text())
            made_with = progress.pop(_WORKERS, trainer.processes)
            if made_with != trainer.processes:
                raise RecordError(_of_other_workers(newest, made_with, trainer.processes))
            trainer.load(newest / _ACTOR)
        except (RayError, OSError, ValueError) as error:
            raise unreadable(newest, first_line(error)) from error
        return progress


def _of_other_workers(checkpoint: Path, made_with: int, workers: int) -> str:
    return (
        f"the checkpoint {checkpoint} was made with {made_with} training workers, each of which wrote its part; this "
        f"run has {workers}. Set trainer_common.n_gpus_per_node × nnodes to {made_with} to go on from it, or "
        "trainer_common.resume: false to start anew; the checkpoint is whole, keep it"
    )

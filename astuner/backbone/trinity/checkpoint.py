"""The run's checkpoints with Trinity, and Trinity's own state folder, from which it resumes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.backbone.training.checkpoints import CheckpointFolder, unreadable
from astuner.backbone.trinity.trainer_config import NAME, PROJECT
from astuner.backbone.trinity.training_backends import TrainingBackend
from astuner.errors import RecordError, first_line

_PROGRESS_FILE = "progress.json"
_MODEL = "model"
_WEIGHTS = "weights"
_LATEST_FILE = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class TrinityCheckpoint:
    """A checkpoint of the run.

    Attributes:
        progress: the run's progress; `step` is the number of finished training steps.
        weights: the reference that `TrainingBackend.store_weights` returned.
    """

    folder: Path
    progress: dict[str, Any]
    weights: str


class TrinityState:
    """Trinity's state folder (`checkpoint_root_dir`); it is recreated whenever a run starts or resumes."""

    def __init__(self, root: Path, training_backend: TrainingBackend) -> None:
        self._root, self._training_backend = root, training_backend
        self._folder = root / PROJECT / NAME

    def clear(self) -> None:
        """Delete the state: an earlier process may have left steps that the run record does not have."""
        shutil.rmtree(self._root, ignore_errors=True)

    def saved_weights(self, trainer_step: int) -> str | None:
        """Return the location of the weights that the trainer saved after a step; None if it did not."""
        return self._training_backend.saved_weights(self._step_folder(trainer_step))

    def newest_weights(self) -> str:
        """Return the location of the weights that the trainer saved last; raise RecordError if they are missing."""
        trainer_step = int((self._folder / _LATEST_FILE).read_text())
        weights = self.saved_weights(trainer_step)
        if weights is None:
            raise RecordError(
                f"{self._step_folder(trainer_step)} lacks the weights that the trainer saved; is the disk full?"
            )
        return weights

    def restore(self, checkpoint: TrinityCheckpoint, updates: int) -> None:
        """Write the state from which Trinity resumes; a training step has `updates` trainer steps."""
        step = checkpoint.progress["step"]
        trainer_step = step * updates
        step_folder = self._step_folder(trainer_step)
        self._training_backend.restore_weights(checkpoint.weights, checkpoint.folder, step_folder)
        (self._folder / _LATEST_FILE).write_text(str(trainer_step))
        (self._folder / "trainer_meta.json").write_text(
            json.dumps({"latest_iteration": trainer_step, "sample_strategy_state": {}})
        )
        (self._folder / "explorer_meta.json").write_text(
            json.dumps({"latest_iteration": step, "taskset_states": [{"current_index": 0}]})
        )

    def _step_folder(self, trainer_step: int) -> Path:
        return self._folder / f"global_step_{trainer_step}"


class TrinityCheckpoints:
    """The checkpoints of a run; older ones than the newest `keep` are deleted.

    `checkpoints/step_000020/` contains the tuned `model/`, `progress.json` and any files of the training backend.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._root = folder
        self._folder = CheckpointFolder(folder, keep)

    def save(
        self,
        step: int,
        store_weights: Callable[[Path], str],
        save_model: Callable[[Path], None],
        progress: dict[str, Any],
    ) -> None:
        """Write the checkpoint of `step`, or raise RecordError and leave earlier ones unchanged.

        `store_weights` is as in `TrainingBackend`; `progress` has what else a resumed run needs, as JSON
        values.
        """

        def fill(folder: Path) -> None:
            save_model(folder / _MODEL)
            (folder / _PROGRESS_FILE).write_text(
                json.dumps({**progress, "step": step, _WEIGHTS: store_weights(folder)})
            )

        self._folder.write(step, fill)

    def newest(self) -> TrinityCheckpoint | None:
        """Return the newest checkpoint; None if there is none. Raise RecordError if it cannot be read."""
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _PROGRESS_FILE).read_text())
            if type(progress["step"]) is not int:
                raise ValueError(f"its step is {progress['step']!r}")
            return TrinityCheckpoint(newest, progress, progress.pop(_WEIGHTS))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise unreadable(newest, first_line(error)) from error

    def remove_old(self) -> None:
        """Remove the checkpoints beyond the newest `keep`, which a killed run may have left."""
        self._folder.remove_old()

    def stored_weights(self) -> list[str]:
        """Return the weight references of all checkpoints, including copies under other names."""
        references = []
        for file in self._root.glob(f"*/{_PROGRESS_FILE}"):
            # An unreadable copy keeps nothing, and a checkpoint is checked when it is loaded.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                references.append(str(json.loads(file.read_text())[_WEIGHTS]))
        return references

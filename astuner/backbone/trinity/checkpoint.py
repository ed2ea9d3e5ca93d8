"""Checkpoints of a Tinker service's model: where the service keeps it, and the run's progress."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astuner.backbone.checkpoint_folder import CheckpointFolder, unreadable
from astuner.backbone.trinity.composition import NAME, PROJECT
from astuner.errors import RecordError
from astuner.model_tuner import first_line

_STATE = "progress.json"
_MODEL = "model"
_WEIGHTS = "weights"
_SAVED = "remote_checkpoint_path.txt"
_NEWEST = "latest_checkpointed_iteration.txt"


class TrinityState:
    """What Trinity keeps of a run on disk; made anew by each process of the launcher's."""

    def __init__(self, root: Path) -> None:
        """Use `root`, Trinity's `checkpoint_root_dir`."""
        self._root = root
        self._folder = root / PROJECT / NAME

    def clear(self) -> None:
        """Remove what an earlier process has left: it may be of steps that the record does not have."""
        shutil.rmtree(self._root, ignore_errors=True)

    def saved(self, number: int) -> str | None:
        """Return the path of the weights that the trainer saved after its step `number`."""
        file = self._folder / f"global_step_{number}" / _SAVED
        return file.read_text().strip() if file.is_file() else None

    def newest(self) -> str:
        """Return the path of the weights that the trainer saved last."""
        number = int((self._folder / _NEWEST).read_text())
        return (self._folder / f"global_step_{number}" / _SAVED).read_text().strip()

    def restore(self, step: int, number: int, weights: str) -> None:
        """Have Trinity go on.

        Args:
            step: finished training steps, which are the explorer's.
            number: finished steps of Trinity's trainer.
            weights: what `saved` returned.
        """
        folder = self._folder / f"global_step_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".full_checkpoint").touch()
        (folder / _SAVED).write_text(weights)
        (self._folder / _NEWEST).write_text(str(number))
        (self._folder / "trainer_meta.json").write_text(
            json.dumps({"latest_iteration": number, "sample_strategy_state": {}})
        )
        (self._folder / "explorer_meta.json").write_text(
            json.dumps({"latest_iteration": step, "taskset_states": [{"current_index": 0}]})
        )


class TrinityCheckpoints:
    """`checkpoints/step_000020/` holds the tuned `model/` and `progress.json`, which names the service's weights."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`; older checkpoints beyond `keep` are removed."""
        self._place = folder
        self._folder = CheckpointFolder(folder, keep, _STATE)

    def save(self, step: int, weights: str, save_model: Callable[[Path], None], progress: dict[str, Any]) -> None:
        """Write the checkpoint of `step`.

        Args:
            step: finished training steps.
            weights: the service's path.
            save_model: writes a Hugging Face folder.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """

        def fill(folder: Path) -> None:
            save_model(folder / _MODEL)
            (folder / _STATE).write_text(json.dumps({**progress, "step": step, _WEIGHTS: weights}))

        self._folder.write(step, fill)

    def newest(self) -> tuple[dict[str, Any], str] | None:
        """Return the newest checkpoint's progress (with `step`) and the service's path; None where there is none.

        Raises:
            RecordError: it cannot be read.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _STATE).read_text())
            return progress, progress.pop(_WEIGHTS)
        except (OSError, ValueError, KeyError) as error:
            raise unreadable(newest, first_line(error)) from error

    def kept(self) -> list[str]:
        """Return the service's paths of all checkpoints that are kept."""
        found = []
        for file in self._place.glob(f"step_*/{_STATE}"):
            try:
                found.append(json.loads(file.read_text())[_WEIGHTS])
            except (OSError, ValueError, KeyError) as error:
                raise RecordError(f"{file} cannot be read: {first_line(error)}; remove its folder") from error
        return found

"""Trinity's own state on disk, and the run's checkpoints, which are made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.backbone.checkpoint_folder import CheckpointFolder, unreadable
from astuner.backbone.trinity.composition import NAME, PROJECT
from astuner.backbone.trinity.sides import Side
from astuner.errors import RecordError
from astuner.model_tuner import first_line

_STATE = "progress.json"
_MODEL = "model"
_WEIGHTS = "weights"
_NEWEST = "latest_checkpointed_iteration.txt"


class TrinityState:
    """What Trinity keeps of a run on disk; made anew by each process of the launcher's."""

    def __init__(self, root: Path, side: Side) -> None:
        """Use `root`, Trinity's `checkpoint_root_dir`, in which `side` saves weights."""
        self._root, self._side = root, side
        self._folder = root / PROJECT / NAME

    def clear(self) -> None:
        """Remove what an earlier process has left: it may be of steps that the record does not have."""
        shutil.rmtree(self._root, ignore_errors=True)

    def saved(self, number: int) -> str | None:
        """Return where the weights are that the trainer saved after its step `number`."""
        return self._side.saved(self._place(number))

    def newest(self) -> str:
        """Return where the weights are that the trainer saved last.

        Raises:
            RecordError: it says that it saved, and did not.
        """
        number = int((self._folder / _NEWEST).read_text())
        found = self.saved(number)
        if found is None:
            raise RecordError(f"{self._place(number)} lacks the trainer's weights; is the disk full?")
        return found

    def restore(self, kept: Kept, updates: int) -> None:
        """Have Trinity go on.

        Args:
            kept: the run's checkpoint.
            updates: steps of Trinity's trainer in a training step.
        """
        step = kept.progress["step"]
        number = step * updates
        self._side.put_back(kept.weights, kept.folder, self._place(number))
        (self._folder / _NEWEST).write_text(str(number))
        (self._folder / "trainer_meta.json").write_text(
            json.dumps({"latest_iteration": number, "sample_strategy_state": {}})
        )
        (self._folder / "explorer_meta.json").write_text(
            json.dumps({"latest_iteration": step, "taskset_states": [{"current_index": 0}]})
        )

    def _place(self, number: int) -> Path:
        return self._folder / f"global_step_{number}"


@dataclass(frozen=True)
class Kept:
    """A checkpoint.

    Attributes:
        folder: where it is.
        progress: with `step`, the finished training steps.
        weights: what its side kept, see `Side.keep`.
    """

    folder: Path
    progress: dict[str, Any]
    weights: str


class TrinityCheckpoints:
    """`checkpoints/step_000020/` holds the tuned `model/` and `progress.json`, and what the run's side keeps."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`; older checkpoints beyond `keep` are removed."""
        self._place = folder
        self._folder = CheckpointFolder(folder, keep, _STATE)

    def save(
        self,
        step: int,
        keep: Callable[[Path], str],
        save_model: Callable[[Path], None],
        progress: dict[str, Any],
    ) -> None:
        """Write the checkpoint of `step`.

        Args:
            step: finished training steps.
            keep: keeps the weights with the checkpoint, see `Side.keep`.
            save_model: writes a Hugging Face folder.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """

        def fill(folder: Path) -> None:
            save_model(folder / _MODEL)
            (folder / _STATE).write_text(json.dumps({**progress, "step": step, _WEIGHTS: keep(folder)}))

        self._folder.write(step, fill)

    def newest(self) -> Kept | None:
        """Return the newest checkpoint; None where there is none.

        Raises:
            RecordError: it cannot be read.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            progress: dict[str, Any] = json.loads((newest / _STATE).read_text())
            return Kept(newest, progress, progress.pop(_WEIGHTS))
        except (OSError, ValueError, KeyError) as error:
            raise unreadable(newest, first_line(error)) from error

    def kept(self) -> list[str]:
        """Return what the side kept of all checkpoints that are there."""
        found = []
        for file in self._place.glob(f"step_*/{_STATE}"):
            try:
                found.append(json.loads(file.read_text())[_WEIGHTS])
            except (OSError, ValueError, KeyError) as error:
                raise RecordError(f"{file} cannot be read: {first_line(error)}; remove its folder") from error
        return found

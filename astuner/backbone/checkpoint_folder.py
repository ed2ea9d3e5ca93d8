"""A run's checkpoints and its tuned model: folders that a kill at any moment cannot spoil."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from astuner.backbone.whole_folder import written_whole
from astuner.errors import RecordError

_GOES_ON = "Mend that, and the same command goes on from the last whole checkpoint"


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run, `checkpoints/step_000020/` and so on; what bears such a name is whole.

    Attributes:
        folder: where they are.
        keep: older ones beyond this many are removed.
        state: the file in each without which it is none.
    """

    folder: Path
    keep: int
    state: str

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Have `fill` write the checkpoint of `step` into a folder that it is given; return where it is then.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        with written_whole(final, "the checkpoint", f"{_GOES_ON}; or start anew with another --exp-dir.") as partial:
            fill(partial)
        for old in self._whole()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def newest(self) -> Path | None:
        """Return the newest checkpoint, if there is one."""
        whole = self._whole()
        return whole[-1] if whole else None

    def _whole(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if (path / self.state).exists())


def unreadable(checkpoint: Path, reason: str) -> RecordError:
    """Return the error for a checkpoint that is spoilt."""
    return RecordError(
        f"the checkpoint {checkpoint} cannot be read ({reason}); remove that folder to go on from the one before, or "
        "set trainer_common.resume: false to start anew"
    )


def write_model(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Have `fill` write a run's tuned model, in the place of an earlier one; return its folder.

    Raises:
        RecordError: it cannot be written.
    """
    with written_whole(folder, "the tuned model", f"{_GOES_ON}.") as partial:
        fill(partial)
    return folder

"""Folders that a kill at any moment cannot spoil: written beside their place, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from astuner.errors import RecordError

WRITE_ERRORS: tuple[type[Exception], ...] = (OSError, RuntimeError, SafetensorError)
"""What a full disk makes PyTorch and safetensors raise."""


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
        partial = self.folder / f".partial_{step:06d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            fill(partial)
            put_in_place(partial, final)
        except WRITE_ERRORS as error:
            free = free_space(self.folder)
            shutil.rmtree(partial, ignore_errors=True)
            raise RecordError(
                f"the checkpoint {final} could not be written: {error} ({free}). Mend that, and the same command goes "
                "on from the last whole checkpoint; or start anew with another --exp-dir."
            ) from error
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
    partial = folder.with_name(f".partial_{folder.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        fill(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except WRITE_ERRORS as error:
        free = free_space(folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise RecordError(
            f"the tuned model could not be written to {folder}: {error} ({free}). Mend that, and the same command "
            "goes on from the last checkpoint."
        ) from error
    return folder


def free_space(folder: Path) -> str:
    """Say how much space is left where `folder` is or would be; PyTorch's own errors hide a full disk."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{shutil.disk_usage(there).free / 2**20:.1f} MiB are free there"


def put_in_place(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`; an earlier one of that name goes only when the new one is in its place."""
    earlier = final.with_name(f".earlier_{final.name}")
    shutil.rmtree(earlier, ignore_errors=True)
    if final.exists():
        final.rename(earlier)
    partial.rename(final)
    shutil.rmtree(earlier, ignore_errors=True)

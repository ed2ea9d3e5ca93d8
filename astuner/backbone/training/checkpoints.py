"""Folders of checkpoints and models, written atomically: they are complete or absent, even if the process is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from astuner.errors import RecordError

RESUME_HINT = "Run the same command again to resume from the last checkpoint"
"""Ends the messages of errors after which a run can be resumed."""


@contextlib.contextmanager
def atomic_dir(final: Path, what: str, advice: str) -> Iterator[Path]:
    """Give a new folder to write to, and rename it to `final` at the end of the block.

    An earlier folder of that name is removed only then.

    Args:
        final: the path of the folder.
        what: its name in messages.
        advice: how to fix a failure, for the message.

    Raises:
        RecordError: it cannot be written; an earlier folder is unchanged.
    """
    partial, earlier = final.with_name(f".partial_{final.name}"), final.with_name(f".earlier_{final.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(earlier, ignore_errors=True)
        if final.exists():
            final.rename(earlier)
        partial.rename(final)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk makes PyTorch and safetensors raise
        # PyTorch's messages hide that the disk is full.
        existing = next(parent for parent in final.absolute().parents if parent.exists())
        free = f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB are free"
        raise RecordError(f"{what} could not be written to {final}: {error} ({free}). {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_synced(state: Any, file: Path) -> None:
    """Write `state` with `torch.save`, and flush it to the disk."""
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run: the folders `checkpoints/step_000020/` and so on.

    Attributes:
        folder: contains them.
        keep: the number of checkpoints to keep; older ones are removed.
        state: the name of a file that every complete checkpoint has.
    """

    folder: Path
    keep: int
    state: str

    def write(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have `write` write the checkpoint of `step` to the folder that it is called with; return its final path.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are unchanged.
        """
        final = self.folder / f"step_{step:06d}"
        advice = f"Fix this first. {RESUME_HINT}, or start from scratch with another --exp-dir."
        with atomic_dir(final, "the checkpoint", advice) as partial:
            write(partial)
        for old in self._complete()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def newest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        return next(reversed(self._complete()), None)

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if (path / self.state).exists())


def unreadable(checkpoint: Path, reason: str) -> RecordError:
    """Return the error for a damaged checkpoint."""
    return RecordError(
        f"the checkpoint {checkpoint} cannot be read ({reason}); remove that folder to resume from the one before, or "
        "set trainer_common.resume: false to start from scratch"
    )


def write_model(folder: Path, write: Callable[[Path], None]) -> Path:
    """Have `write` write the tuned model of a run, which replaces an earlier one; return its folder.

    Raises:
        RecordError: it cannot be written.
    """
    with atomic_dir(folder, "the tuned model", f"Fix this first. {RESUME_HINT}.") as partial:
        write(partial)
    return folder

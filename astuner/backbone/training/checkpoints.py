"""Folders of checkpoints and models, written atomically: they are complete or absent, even if the process is killed.

A checkpoint is a folder `checkpoints/step_000020` with a file `complete.json`, which names its step and the size of
every file in it. Nothing else in `checkpoints/` is read, counted or removed: neither copies under other names, nor
links.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger
from safetensors import SafetensorError

from astuner.errors import RecordError

RESUME_HINT = "Run the same command again to resume from the last checkpoint"
"""Ends the messages of errors after which a run can be resumed."""

_MARKER = "complete.json"
# Versions of astuner without the marker wrote one of these files last.
_LAST_FILES = ("trainer.pt", "progress.json")
_NAME = re.compile(r"step_([0-9]{6,})")
_DAMAGED = f"its files differ from {_MARKER}"
_EARLIER, _PARTIAL, _REMOVED = ".earlier_", ".partial_", ".removed_"


@contextlib.contextmanager
def atomic_dir(final: Path, what: str, advice: str) -> Iterator[Path]:
    """Give a new folder to write to, and rename it to `final` at the end of the block.

    An earlier folder of that name is removed only then.

    Args:
        what: its name in messages.
        advice: how to fix a failure, for the message.

    Raises:
        RecordError: it cannot be written; an earlier folder is unchanged.
    """
    partial, earlier = final.with_name(f"{_PARTIAL}{final.name}"), final.with_name(f"{_EARLIER}{final.name}")
    try:
        _remove(partial)
        partial.mkdir(parents=True)
        yield partial
        _remove(earlier)
        if final.exists() or final.is_symlink():
            final.rename(earlier)
        partial.rename(final)
        _remove(earlier)
    except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk makes PyTorch and safetensors raise
        # PyTorch's messages hide that the disk is full.
        existing = next(parent for parent in final.absolute().parents if parent.exists())
        free = f"{shutil.disk_usage(existing).free / 2**20:.1f} MiB are free"
        raise RecordError(f"{what} could not be written to {final}: {error} ({free}). {advice}") from error
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    """Remove a folder, or a link or file in its place, as far as possible."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def save_synced(state: Any, file: Path) -> None:
    """Write `state` with `torch.save`, and flush it to the disk."""
    import torch

    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


@dataclass(frozen=True)
class CheckpointFolder:
    """The newest `keep` checkpoints of one run: the folders `checkpoints/step_000020/` and so on."""

    folder: Path
    keep: int

    def write(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have `write` write the checkpoint of `step` to the folder that it is called with; return its final path.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are unchanged.
        """
        final = self.folder / f"step_{step:06d}"
        advice = f"Fix this first. {RESUME_HINT}, or start from scratch with another --exp-dir."
        with atomic_dir(final, "the checkpoint", advice) as partial:
            write(partial)
            marker = {"step": step, "files": _file_sizes(partial)}
            (partial / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
        self.remove_old()
        return final

    def remove_old(self) -> None:
        """Remove all but the newest `keep` checkpoints.

        A resumed run calls this once it has read the newest one, because a kill can follow the write of a checkpoint
        before the oldest one is removed.
        """
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            # Renamed first: a kill must not leave a part of it under the name of a checkpoint.
            removed = old.with_name(f"{_REMOVED}{old.name}")
            with contextlib.suppress(OSError):
                old.rename(removed)
                _remove(removed)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, or None; repair what a kill has left. RecordError: all are damaged."""
        for path in self.folder.glob(f"{_EARLIER}step_*"):
            final = path.with_name(path.name.removeprefix(_EARLIER))
            if not final.exists():  # killed between the two renames of `atomic_dir`
                path.rename(final)
        for prefix in (_EARLIER, _PARTIAL, _REMOVED):
            for path in self.folder.glob(f"{prefix}step_*"):
                _remove(path)
        newest = next(reversed(complete_checkpoints(self.folder)), None)
        damaged = [path for path in damaged_checkpoints(self.folder) if newest is None or path > newest]
        if damaged and newest is None:
            raise unreadable(damaged[-1], _DAMAGED)
        for path in damaged:
            logger.warning("the checkpoint {} is damaged ({}); {} is used instead", path, _DAMAGED, newest)
        return newest


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder `checkpoints`, the oldest first."""
    found = {step: path for step, path in _folders(folder) if _is_complete(path, step)}
    # A process may have been killed while it replaced a checkpoint by another of the same step.
    for path in folder.glob(f"{_EARLIER}step_*"):
        match = _NAME.fullmatch(path.name.removeprefix(_EARLIER))
        if match is not None and int(match[1]) not in found and _is_complete(path, int(match[1])):
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def damaged_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that were complete and whose files have changed since, the oldest first."""
    return [
        path for step, path in sorted(_folders(folder)) if _marked_files(path, step) and not _is_complete(path, step)
    ]


def _folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the step and the path of each folder that is named like a checkpoint."""
    for path in folder.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        # Numbers with unnecessary zeros, as in step_0000020, are names of copies.
        if match is not None and path.name == f"step_{int(match[1]):06d}" and not path.is_symlink():
            yield int(match[1]), path


def _marked_files(path: Path, step: int) -> dict[str, object] | None:
    """Return the file sizes in the marker of `step`; empty if it is damaged or another step's, None without one."""
    try:
        marker = json.loads((path / _MARKER).read_bytes())
        return dict(marker["files"]) if marker["step"] == step else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _is_complete(path: Path, step: int) -> bool:
    marked = _marked_files(path, step)
    if marked is None:
        return any((path / name).stat().st_size for name in _LAST_FILES if (path / name).is_file())
    sizes = _file_sizes(path)
    return bool(marked) and all(sizes.get(name) == size for name, size in marked.items())


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def unreadable(checkpoint: Path, reason: str) -> RecordError:
    """Return the error for a damaged checkpoint."""
    return RecordError(
        f"the checkpoint {checkpoint} cannot be read ({reason}); remove that folder to resume from the one before, or "
        "set trainer_common.resume: false to start from scratch"
    )

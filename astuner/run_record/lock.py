"""Keeps two live runs out of one folder."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from astuner.errors import RecordError
from astuner.run_record.files import storing


class FolderLock:
    """A lock on a run's folder, freed by the system however its holder dies.

    The file lies beside the folder (`.{name}.lock`), so that the lock holds while the folder is moved aside; it stays
    after the run and means nothing by itself.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            RecordError: a live run holds it (names the process), or its file cannot be written.
        """
        folder = folder.resolve()
        path = _lock_file(folder)
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with storing(path):
                _lock(self._fd, folder)
                os.ftruncate(self._fd, 0)
                os.write(self._fd, str(os.getpid()).encode())
        except RecordError:
            self._close()
            raise
        _held.add(self)

    def release(self) -> None:
        """Free the lock; does nothing where it is free."""
        if self._fd is not None:
            # This process may live on, and no longer writes there.
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_being_written(folder: Path) -> bool:
    """Return whether a run is being written into `folder` by a process that lives on this machine.

    The lock itself is not touched: a run that starts at this moment must not find it taken.
    """
    try:
        os.kill(int(_lock_file(folder.resolve()).read_text()), 0)
    except PermissionError:  # it lives, and is somebody else's
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _lock_file(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.lock"


def _lock(fd: int, folder: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
        raise RecordError(
            f"{folder} is being written by a live run (process {holder}); wait until it ends, stop it, "
            "or give this run another experiment_name or --exp-dir"
        ) from None


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    # A forked worker that outlives its killed parent would otherwise keep the next run out.
    for lock in _held:
        lock._close()


os.register_at_fork(after_in_child=_release_in_child)

"""The temporary folder for the sockets and logs of a Ray instance that a run starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from astuner.errors import BackboneError

TEMP_DIR_FIX = "export RAY_TMPDIR=/tmp"

_PREFIX = "ast-"
_LOCK = "owner"
_REMOVALS, _REMOVAL_SECONDS = 20, 0.1
_SHORT = Path("/tmp")
# The longest path below the parent folder: with Ray as a service of the run.
_SOCKET = "/astuner-01234567/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
# The OS limit on a socket's path, without the terminating NUL.
_MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107


def preferred_parent() -> Path:
    """Return RAY_TMPDIR, or the system's folder for temporary files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()


def is_too_long(parent: Path) -> bool:
    """Return whether the sockets of a Ray instance below `parent` would exceed the OS limit on socket paths."""
    return len(os.fsencode(parent)) + len(_SOCKET) > _MAX_SOCKET_PATH


def short_parent() -> Path:
    """Return the preferred parent folder, or /tmp if its path is too long."""
    parent = preferred_parent()
    return _SHORT if is_too_long(parent) else parent


@contextlib.contextmanager
def ray_temp_dir() -> Iterator[str]:
    """Create a folder for the block; also remove the folders of killed runs.

    Raises:
        BackboneError: the folder cannot be created.
    """
    parent = short_parent()
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # The OS releases the lock of a killed run. Errors: the folder's run is alive, it belongs to another user, or
        # another run has just removed it.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
    for folder in parent.glob(f"{_PREFIX}*"):
        # A process of a dead run has written into its folder after the lock was removed.
        if not (folder / _LOCK).exists():
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        try:
            folder = _create_locked(parent, stack)
        except OSError as error:
            raise BackboneError(
                f"Ray's temporary folder cannot be created in {parent} ({error}); {TEMP_DIR_FIX}, or set it to another "
                "writable folder with a short path"
            ) from error
        stack.callback(_remove, folder)
        yield str(folder)


def _remove(folder: Path) -> None:
    """Remove a folder. Ray's processes end shortly after their run, and may write into it meanwhile."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_REMOVAL_SECONDS)


def _create_locked(parent: Path, stack: contextlib.ExitStack) -> Path:
    """Create a folder that is locked until the stack closes; it gets its final name only once it is locked."""
    folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    lock = stack.enter_context((folder / _LOCK).open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder.rename(parent / folder.name.removeprefix("."))

"""The temporary folder for the sockets and logs of a Ray instance that a run starts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from astuner.errors import BackboneError

TEMP_DIR_FIX = "export RAY_TMPDIR=/tmp"

# The parent of the folders of all runs of a user. Only its name marks it as astuner's, because a process of a run that
# has ended may create it again at any time.
_HOME = f"astuner-ray-{os.getuid()}"
_NAME = "[0-9a-f]" * 8
_LOCK_SUFFIX = ".lock"
_CREATIONS = 20
_REMOVALS, _REMOVAL_SECONDS = 20, 0.1
_SHORT = Path("/tmp")
# The longest path below the parent folder: of the run's own Ray, or with Ray as a service of the run.
_SOCKET = max(f"/{_HOME}/01234567", "/astuner-01234567/ray", key=len)
_SOCKET += "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
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
    """Create a folder for the block; also remove the folders of this user's killed runs.

    Raises:
        BackboneError: the folder cannot be created.
    """
    parent = short_parent()
    home = parent / _HOME
    with contextlib.ExitStack() as stack:
        try:
            _create_home(home)
            _remove_dead(home)
            folder = _create_locked(home, stack)
        except OSError as error:
            raise BackboneError(
                f"Ray's temporary folder cannot be created in {parent} ({error}); {TEMP_DIR_FIX}, or set it to another "
                "writable folder with a short path"
            ) from error
        yield str(folder)


def _create_home(home: Path) -> None:
    """Create the folder of this user's runs, unless it exists.

    Raises:
        OSError: it cannot be created, or another user has created it.
    """
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{home} belongs to another user")


def _remove_dead(home: Path) -> None:
    """Remove the folders of runs that have ended."""
    for path in home.glob(_NAME + _LOCK_SUFFIX):
        # The OS releases the lock of a killed run. Errors: the run is alive, or another one has just removed it.
        with contextlib.suppress(OSError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_ray_temp_dir(path.with_suffix(""))
    for folder in home.glob(_NAME):
        # A process of a run that has ended has written into its folder after the lock was removed.
        if not folder.with_suffix(_LOCK_SUFFIX).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _create_locked(home: Path, stack: contextlib.ExitStack) -> Path:
    """Create a folder. It is locked until the stack closes, and then removed.

    The lock is a file next to the folder. It is created before the folder and removed after it, so a folder without a
    lock belongs to a run that has ended.
    """
    for _ in range(_CREATIONS):
        _create_home(home)  # another run may have removed it at its end
        folder = home / secrets.token_hex(4)
        path = folder.with_suffix(_LOCK_SUFFIX)
        with contextlib.ExitStack() as attempt, contextlib.suppress(FileNotFoundError, BlockingIOError):
            file = attempt.enter_context(path.open("x"))
            attempt.callback(remove_ray_temp_dir, folder)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Until here, another run could take the file for the lock of a run that has ended, and remove it.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                folder.mkdir()
                stack.push(attempt.pop_all())
                return folder
    raise FileExistsError(f"other runs remove the files in {home}")


def remove_ray_temp_dir(folder: Path) -> None:
    """Remove a run's folder, its lock, and the folder for all runs if this was the last one.

    Ray's processes end shortly after their run, and may write into its folder meanwhile.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(_REMOVAL_SECONDS)
    folder.with_suffix(_LOCK_SUFFIX).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()

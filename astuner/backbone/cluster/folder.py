"""The folder in which a run's own Ray keeps its sockets and logs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from astuner.errors import BackboneError

MEND = "export RAY_TMPDIR=/tmp"

_PREFIX = "ast-"
_LOCK = "owner"
_SHORT = Path("/tmp")
# What Ray and `mkdtemp` put behind the parent, at its longest: where Ray is a service of the run.
_SOCKET = "/astuner-01234567/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
# The system's bound on a socket's path, less the NUL at its end.
_LONGEST = 103 if sys.platform == "darwin" else 107


def wanted_parent() -> Path:
    """Return RAY_TMPDIR, or else the folder for temporary files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()).absolute()


def is_too_long(parent: Path) -> bool:
    """Whether a socket of a Ray in `parent` would have a longer path than the system allows."""
    return len(os.fsencode(parent)) + len(_SOCKET) > _LONGEST


def short_parent() -> Path:
    """Return the wanted parent, or /tmp where that is too long."""
    wanted = wanted_parent()
    return _SHORT if is_too_long(wanted) else wanted


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """Give a folder for the block, in /tmp where the wanted parent is too long; remove those of killed runs.

    Raises:
        BackboneError: none can be made there.
    """
    parent = short_parent()
    _remove_left_behind(parent)
    with contextlib.ExitStack() as stack:
        try:
            folder = _locked_folder(parent, stack)
        except OSError as error:
            raise BackboneError(
                f"Ray needs a folder for temporary files, and none can be made in {parent} ({error}); {MEND}, or name "
                "another short folder that can be written"
            ) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield str(folder)


def _locked_folder(parent: Path, stack: contextlib.ExitStack) -> Path:
    """Make a folder whose lock is held until the stack is left; it has its name only once it is locked."""
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    lock = stack.enter_context((made / _LOCK).open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(parent / made.name.removeprefix("."))


def _remove_left_behind(parent: Path) -> None:
    """Remove the folders of runs that were killed: the system has given their locks back."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # Another user's, or removed by another run meanwhile, or of a run that lives.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)

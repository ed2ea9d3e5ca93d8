"""Environment variables for Ray and its processes, and the temporary folder of a run's own Ray instance."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path

from astuner.errors import BackboneError

OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray kills workers if the machine's memory is nearly full, even if other programs use it. The OS still kills
    # processes if the memory is full.
    "RAY_memory_monitor_refresh_ms": "0",
    # By default, Ray runs its workers at a low priority; here they are the main work.
    "RAY_worker_niceness": "0",
    # Without this, Ray starts workers before it knows the driver's environment, and then starts others.
    "RAY_prestart_worker_first_driver": "0",
}

ON_LOOPBACK = {
    # Read when ray is imported. Without it, Ray replaces 127.0.0.1 by the network address and listens on all
    # interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

OWN_ENVIRONMENT: Mapping[str, str] = OWN_RAY | ON_LOOPBACK
"""Variables for a Ray instance that a run starts on this machine, and for the processes that use it."""

TOKEN_MODE = "RAY_AUTH_MODE"
"""Whether Ray's processes authenticate with a token. Ray sets it when it starts, and does not unset it."""

CLUSTER_PORT = 6379
"""Port of a head that other machines join: Ray's default port."""

LEAST_CPUS = 64
"""Minimum CPU count to declare. Ray only counts CPUs; actors that request more than declared would wait forever."""

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


@contextlib.contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set variables during the block, except those that the user has set; yield the values of all variables."""
    added = variables.keys() - os.environ.keys()
    temporary = added if TOKEN_MODE in os.environ else added | {TOKEN_MODE}
    os.environ.update({name: variables[name] for name in added})
    try:
        yield {name: os.environ[name] for name in variables}
    finally:
        for name in temporary:
            os.environ.pop(name, None)


def on_loopback() -> contextlib.AbstractContextManager[dict[str, str]]:
    """Make Ray listen on this machine only if it is imported during the block."""
    return environment_set(ON_LOOPBACK)


def pretended_gpus(count: int) -> dict[str, str]:
    """Return the environment variables with which Ray accepts `count` GPUs that the machine does not have.

    Ray accepts no more GPUs than `CUDA_VISIBLE_DEVICES` names, if the user has set it.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


@contextlib.contextmanager
def environment_replaced(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the block, including those that the user has set, and restore them afterwards."""
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export_ray_address() -> None:
    """Export this Ray worker's cluster address to the processes it starts.

    vLLM's engine process receives weights through Ray; without the address it would start its own Ray instance.
    """
    import ray

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


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
    """Create a folder for the block, or raise BackboneError; also remove the folders of this user's killed runs."""
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
    home.mkdir(mode=0o700, exist_ok=True)
    status = home.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{home} belongs to another user")


def _remove_dead(home: Path) -> None:
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

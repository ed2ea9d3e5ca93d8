"""Ending a process group, so that nothing of it stays: no process, and no shared memory that Python keeps books of."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

_POLL_SECONDS = 0.1
_SECONDS_TO_TIDY = 5.0
_TRACKER = "multiprocessing.resource_tracker"


def end_group(group: int, grace: float) -> None:
    """Send SIGTERM, and SIGKILL to those that still live after `grace` seconds.

    Python's resource trackers get some seconds more: when the others of their group are gone, they remove what those
    left in /dev/shm, and end.
    """
    _signal_group(group, signal.SIGTERM)
    if _gone(group, grace):
        return
    for pid in living(group):
        if not _is_tracker(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    if not _gone(group, _SECONDS_TO_TIDY):
        _signal_group(group, signal.SIGKILL)


def living(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def _gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while living(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_tracker(pid: int) -> bool:
    try:
        return any(_TRACKER in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, where all are zombies
        os.killpg(group, number)

"""Functions on processes: children and descendants, and how to end processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL for the processes that an episode has left."""
kept_pids: set[int] = set()
"""Children of this process that later episodes use, and that do not end with the episode that started them."""

_POLL_SECONDS = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 5.0
# Python's resource trackers ignore SIGTERM. They end after the processes that use them, and then remove shared memory.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 3.0


def child_pids(pid: int) -> list[int]:
    """Return the children of a process; empty if it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [child for thread in threads for child in _thread_child_pids(f"/proc/{pid}/task/{thread}")]
    except FileNotFoundError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def _thread_child_pids(thread: str) -> list[int]:
    """Return the children that a thread started.

    Every episode reads the children of several threads, so this avoids the five times slower `pathlib`.

    Args:
        thread: `/proc/PID/task/THREAD`.

    Raises:
        FileNotFoundError: the kernel does not list children.
    """
    try:
        descriptor = os.open(f"{thread}/children", os.O_RDONLY)
    except FileNotFoundError:
        if not os.path.exists(thread):  # it has ended
            return []
        raise
    except ProcessLookupError:
        return []
    listing = b""
    try:
        while part := os.read(descriptor, 4096):  # a read returns at most one page
            listing += part
    except ProcessLookupError:
        return []
    finally:
        os.close(descriptor)
    return [int(word) for word in listing.split()]


def adopt_orphans() -> None:
    """Let this process adopt the orphans among its descendants (`PR_SET_CHILD_SUBREAPER`), where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def find_process(pid: int) -> psutil.Process | None:
    """Return the running process with this id; None if it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if is_running(process):
            return process
    return None


def is_running(process: psutil.Process) -> bool:
    """Return whether the process exists and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def environment_variable(process: psutil.Process, name: str) -> str:
    """Return the value of a variable in a process's environment; empty if it is not set or cannot be read.

    A process that has set a title has overwritten the first variables with zeros, at which psutil stops reading.
    """
    with contextlib.suppress(psutil.Error, OSError):
        if sys.platform != "linux":
            return process.environ().get(name, "")
        prefix = os.fsencode(f"{name}=")
        for variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(prefix):
                return os.fsdecode(variable.removeprefix(prefix))
    return ""


def with_descendants(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return the running processes among `roots` and their descendants."""
    found = {process for process in roots if is_running(process)}
    pending = list(found)
    while pending:
        for pid in child_pids(pending.pop().pid):
            child = find_process(pid)
            if child is not None and child not in found:
                found.add(child)
                pending.append(child)
    return found


def group_members(group: int) -> set[psutil.Process]:
    """Return the running processes of a process group."""
    members = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getpgid(process.pid) == group and is_running(process):
                members.add(process)
    return members


def end_processes(find: Callable[[], set[psutil.Process]], grace: float) -> set[psutil.Process]:
    """End processes: send SIGTERM, and SIGKILL to those that still run after `grace` seconds.

    Args:
        find: returns the running processes to end; called until it returns none, because a process may start others.

    Returns:
        Processes that could not be ended, because they belong to another user or wait for a device.
    """
    term_until = time.monotonic() + grace
    terminated: set[psutil.Process] = set()
    while running := find():
        now = time.monotonic()
        if now > term_until + _KILL_SECONDS:
            return running
        for process in running:
            with contextlib.suppress(psutil.Error):
                is_tracker = now > term_until and _RESOURCE_TRACKER in " ".join(process.cmdline())
                if now > term_until + is_tracker * _TRACKER_SECONDS:
                    process.send_signal(signal.SIGKILL)
                elif process not in terminated:
                    terminated.add(process)
                    process.send_signal(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    return set()

"""Functions on processes: children and descendants, the mark in the environment, and how to end processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARK = "ASTUNER_EPISODE"
"""Environment variable of the processes that a run starts.

Its value is the mark: the token of the run and, in processes of an episode, a slash and the key of the episode. A run
within an episode appends its own tokens.
"""

_POLL_SECONDS = 0.02
_TICK_SECONDS = 0.02
_KILL_SECONDS = 5.0
# Python's resource trackers ignore SIGTERM. They end after the processes that use them, and then remove shared memory.
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 1.0


def child_pids(pid: int) -> list[int]:
    """Return the children of a process; empty if it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [child for thread in threads for child in thread_child_pids(f"/proc/{pid}/task/{thread}")]
    except FileNotFoundError:  # not Linux, or a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []


def thread_child_pids(thread: str) -> list[int]:
    """Return the children that a thread started.

    Every episode reads the children of dozens of threads, so this avoids the five times slower `pathlib`.

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


def creation_clock() -> float:
    """Return the current time on the clock of `psutil.Process.create_time`, rounded down to that clock's resolution.

    On Linux, psutil adds the time since the boot, in ticks, to the time of the boot, in seconds.
    """
    if sys.platform != "linux":
        return time.time()
    return psutil.boot_time() + time.clock_gettime(time.CLOCK_BOOTTIME) - _TICK_SECONDS


def find_process(pid: int, created: float | None = None) -> psutil.Process | None:
    """Return the running process with this id; None if it has ended, or if its id now belongs to another one.

    Args:
        pid: the id.
        created: the process's creation time, in seconds since the epoch; None to accept any.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        # Other processes compute the same time, apart from adjustments of the clock.
        if (created is None or abs(process.create_time() - created) < 2.0) and is_running(process):
            return process
    return None


def is_running(process: psutil.Process) -> bool:
    """Return whether the process exists and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def mark_of(process: psutil.Process) -> list[str]:
    """Return the parts of the process's `ASTUNER_EPISODE`; one empty part if it is not set or cannot be read."""
    return environment_variable(process, MARK).split("/")


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


def end_processes(find: Callable[[], set[psutil.Process]], grace: float) -> set[psutil.Process]:
    """End processes: send SIGTERM, and SIGKILL to those that still run after `grace` seconds.

    Args:
        find: returns the running processes to end; called until it returns none, because a process may start others.
        grace: seconds.

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
                if now > term_until and not (now < term_until + _TRACKER_SECONDS and _is_resource_tracker(process)):
                    process.send_signal(signal.SIGKILL)
                elif process not in terminated:
                    terminated.add(process)
                    process.send_signal(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    return set()


def _is_resource_tracker(process: psutil.Process) -> bool:
    return any(_RESOURCE_TRACKER in word for word in process.cmdline())

"""Whether a process lives, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from astuner.system.process_tree import is_running


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running_after(processes: Iterable[psutil.Process], seconds: float) -> set[psutil.Process]:
    """Wait until the processes have ended, or the time has, and return those that run.

    A process that has ended stays a zombie if the process that has adopted it does not wait for it.
    """
    deadline = time.monotonic() + seconds
    while (running := {process for process in processes if is_running(process)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

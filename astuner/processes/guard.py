"""Runs one service and ends it, with all of its process group, when the launcher closes the pipe or dies.

`python -m astuner.processes.guard` is started by `GuardedProcess`. Its stdin is the pipe: a line of JSON with
`argv`, `cwd`, `env` and `grace`, then nothing until the end of input, which is the sign to stop. The service's output
goes to the guard's stdout; stderr has one line of JSON, `pid` or `error`. The exit code is that of the service, 128 + n
where signal n ended it.

The guard is the service's parent and collects it last of all, so that the number of its process group cannot have
become another's when the group is signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

_POLL_SECONDS = 0.1


def main() -> int:
    """Run the service that stdin names, until it ends or has to; return the exit code."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    launcher = os.getppid()
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline() or "null") or {}
    if not order:  # the launcher ended before it could say anything
        return 1
    try:
        service = subprocess.Popen(
            order["argv"],
            cwd=order["cwd"],
            env=order["env"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    except (OSError, ValueError) as error:
        _tell(error=str(error))
        return 127
    _tell(pid=service.pid)
    # The pipe's end is the usual sign. A process that the launcher forked may hold the pipe open after its death.
    while not (_ended(service.pid) or signals or _closed(sys.stdin.fileno()) or os.getppid() != launcher):
        pass
    _end_group(service.pid, order["grace"])
    code = service.wait()
    return code if code >= 0 else 128 - code


def _tell(**message: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(message).encode() + b"\n")


def _closed(pipe: int) -> bool:
    """Wait a moment for the end of input."""
    readable, _, _ = select.select([pipe], [], [], _POLL_SECONDS)
    return bool(readable) and not os.read(pipe, 4096)


def _ended(pid: int) -> bool:
    """Whether a process of ours has ended; it stays uncollected."""
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _end_group(group: int, grace: float) -> None:
    """SIGTERM, and SIGKILL for those that still live after `grace` seconds."""
    deadline = time.monotonic() + grace
    _signal_group(group, signal.SIGTERM)
    while _living(group):
        if time.monotonic() > deadline:
            _signal_group(group, signal.SIGKILL)
            return
        time.sleep(_POLL_SECONDS)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, where all are zombies
        os.killpg(group, number)


def _living(group: int) -> bool:
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main())

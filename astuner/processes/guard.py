"""Guard process: runs one command, and ends its process group when the launcher closes the pipe or dies.

`GuardedProcess` starts it as `python -m astuner.processes.guard`. Stdin is the pipe. It carries one JSON line with
`argv`, `cwd`, `env`, `grace` and `temp_dir` (null, or the fields of a `TempDir`), then nothing until its end, at which
the guard ends the group. After the line `detach`, only a signal to the guard ends the group. The command's output goes
to the guard's stdout. Stderr carries one line of JSON, with `pid` or `error`. The exit code is the command's, or 128
plus the number of the signal that ended it.

The guard is the command's parent and reaps it last, so that the id of its process group cannot be reused while the
group is signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil

from astuner.system.process_tree import end_processes, environment_variable, group_members

DETACH = b"detach\n"
_POLL_SECONDS = 0.1
# How long processes outside the group are waited for. Ray's agent ends up to 30 seconds after a Ray that was killed.
_OUTSIDER_SECONDS = 10.0
_OUTSIDER_SECONDS_ALONE = 40.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command that is read from stdin until it ends or must be stopped; return the exit code."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    launcher = os.getppid()
    command: dict[str, Any] = json.loads(sys.stdin.buffer.readline() or "null") or {}
    if not command:  # the launcher died first
        return 1
    with _environment(command, launcher) as env:
        try:
            process = subprocess.Popen(
                command["argv"],
                cwd=command["cwd"],
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except (OSError, ValueError) as error:
            _send(error=str(error))
            return 127
        _send(pid=process.pid)
        pipe = _Pipe(sys.stdin.fileno(), launcher)
        # Polled through psutil, which does not reap the process.
        while not (signals or pipe.is_abandoned() or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE):
            pass
        end_processes(lambda: group_members(process.pid), command["grace"])
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Pipe:
    def __init__(self, fd: int, launcher: int) -> None:
        self._fd = fd
        self._launcher = launcher
        self._detached = False

    def is_abandoned(self) -> bool:
        """Wait briefly; return whether the launcher has closed the pipe or died without detaching the process.

        The launcher's death is checked as well, because a process that it forked may keep the pipe open.
        """
        if self._detached:
            time.sleep(_POLL_SECONDS)
            return False
        readable, _, _ = select.select([self._fd], [], [], _POLL_SECONDS)
        line = os.read(self._fd, 4096) if readable else None
        self._detached = line == DETACH
        return not self._detached and (line == b"" or os.getppid() != self._launcher)


def _end_with_parent() -> None:
    """On Linux, have the command receive SIGTERM if the guard is killed and cannot end the group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _environment(command: dict[str, Any], launcher: int) -> Iterator[dict[str, str]]:
    """Yield the command's environment; create its temporary folder, if it has one, and remove it afterwards."""
    env, temp_dir = dict(command["env"]), command["temp_dir"]
    if temp_dir is None:
        yield env
        return
    folder = tempfile.mkdtemp(prefix="astuner-", dir=temp_dir["parent"] or None)
    try:
        yield env | dict.fromkeys(temp_dir["variables"], folder)
    finally:
        _remove(folder, temp_dir["variables"], launcher)


def _remove(folder: str, variables: list[str], launcher: int) -> None:
    """Remove a folder, again and again until the processes that have it in a variable end: they may recreate it."""
    until = time.monotonic() + (_OUTSIDER_SECONDS if os.getppid() == launcher else _OUTSIDER_SECONDS_ALONE)
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        users = (
            user for user in psutil.process_iter() for name in variables if environment_variable(user, name) == folder
        )
        if time.monotonic() > until or (next(users, None) is None and not os.path.exists(folder)):
            return
        time.sleep(_POLL_SECONDS)


def _send(**message: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())

"""Runs one process and ends it, with all of its group, when the launcher closes the pipe or dies.

`python -m astuner.processes.guard` is started by `GuardedProcess`. Its stdin is the pipe: a line of JSON with `argv`,
`cwd`, `env`, `grace` and `own_tmp` (null, or an `OwnFolder`), then nothing until the end of input, which is the sign to
stop; or a line `keep`, after which the process stays until the guard is told to end by a signal. The process's output
goes to the guard's stdout; stderr has one line of JSON, `pid` or `error`. The exit code is that of the process, 128 + n
where signal n ended it.

The guard is the process's parent and collects it last of all, so that the number of its process group cannot have
become another's when the group is signalled.
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

from astuner.processes.group import end_group

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
KEEP = b"keep\n"


def main() -> int:
    """Run the process that stdin names, until it ends or has to; return the exit code."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    launcher = os.getppid()
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline() or "null") or {}
    if not order:  # the launcher ended before it could say anything
        return 1
    with _environment(order) as env:
        try:
            process = subprocess.Popen(
                order["argv"],
                cwd=order["cwd"],
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except (OSError, ValueError) as error:
            _tell(error=str(error))
            return 127
        _tell(pid=process.pid)
        pipe = _Pipe(sys.stdin.fileno(), launcher)
        while not (_ended(process.pid) or signals or pipe.is_left()):
            pass
        end_group(process.pid, order["grace"])
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Pipe:
    """The pipe to the launcher."""

    def __init__(self, fd: int, launcher: int) -> None:
        self._fd = fd
        self._launcher = launcher
        self._kept = False

    def is_left(self) -> bool:
        """Wait a moment; return whether the launcher has closed the pipe or died, without a word to keep the process.

        Its end is the usual sign. A process that the launcher forked may hold the pipe open after its death.
        """
        if self._kept:
            time.sleep(_POLL_SECONDS)
            return False
        readable, _, _ = select.select([self._fd], [], [], _POLL_SECONDS)
        said = os.read(self._fd, 4096) if readable else None
        self._kept = said == KEEP
        return not self._kept and (said == b"" or os.getppid() != self._launcher)


def _end_with_parent() -> None:
    """Have Linux end the service's first process where this one is killed, when nobody is left to end its group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _environment(order: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The process's environment, with a folder for its temporary files that ends with the guard if one is asked for."""
    env, own = dict(order["env"]), order["own_tmp"]
    if own is None:
        yield env
        return
    folder = tempfile.mkdtemp(prefix="astuner-", dir=own["parent"])
    try:
        yield env | dict.fromkeys(own["variables"], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tell(**message: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, json.dumps(message).encode() + b"\n")


def _ended(pid: int) -> bool:
    """Whether a process of ours has ended; it stays uncollected."""
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


if __name__ == "__main__":
    sys.exit(main())

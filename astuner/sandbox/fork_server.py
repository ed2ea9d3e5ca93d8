"""Forks a sandbox for each request. `python -s -u` runs `serve`, so it imports the standard library only.

Starting an interpreter takes several times as long as a fork, and an agent may run thousands of programs. The forked
process is the launcher (see `program_launcher`). A program in Python runs in a fork of the launcher, so this process
starts as the interpreter of a program would.

Stdin is a Unix socket. A request is a letter and a number:

- `r` starts the sandbox of this number. Its descriptors are a file with the job, the program's stdout and stderr, and
  the pipe of the report. This process does not read the job, so no program can find another one's data in its memory;
- `e` ends it with SIGTERM. If it has ended, this does nothing.

At the end of the requests, all sandboxes and then this process end.
"""

from __future__ import annotations

import gc
import os
import select
import struct
import sys
from _signal import SIG_DFL, SIGCHLD, SIGTERM, set_wakeup_fd, signal  # type: ignore[import-not-found]
from _socket import CMSG_SPACE, socket  # `socket` and `signal` import much more

TYPE_CHECKING = False
if TYPE_CHECKING:
    from astuner.sandbox import program_launcher
else:
    import program_launcher

_REQUEST = struct.Struct("=cQ")
_DESCRIPTORS = struct.Struct("@4i")


def serve() -> None:
    """Handle requests until they end."""
    requests = socket(fileno=0)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal(SIGCHLD, lambda *_: None)
    set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    gc.freeze()  # a collection in a program looks at its own objects only
    sandboxes: dict[int, int] = {}  # the launchers that have not been reaped, by number
    while True:
        readable, _, _ = select.select([requests.fileno(), wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
            _reap(sandboxes)
        if requests.fileno() not in readable:
            continue
        request, control, _, _ = requests.recvmsg(_REQUEST.size, CMSG_SPACE(_DESCRIPTORS.size))
        if not request:
            break
        letter, number = _REQUEST.unpack(request)
        if letter == b"e":
            if number in sandboxes:
                os.kill(sandboxes[number], SIGTERM)
            continue
        descriptors = _DESCRIPTORS.unpack(control[0][2])
        try:
            pid = os.fork()
        except OSError:  # the caller sees that the pipe of the report closes
            pid = -1
        if pid == 0:
            set_wakeup_fd(-1)
            signal(SIGCHLD, SIG_DFL)
            os.close(wakeup)
            os.close(wakeup_end)
            program_launcher.run(*descriptors)
        if pid > 0:
            sandboxes[number] = pid
        for descriptor in descriptors:
            os.close(descriptor)
    for pid in sandboxes.values():
        os.kill(pid, SIGTERM)
    while sandboxes:
        os.read(wakeup, 4096)
        _reap(sandboxes)
    sys.exit()


def _reap(sandboxes: dict[int, int]) -> None:
    while sandboxes and (pid := os.waitpid(-1, os.WNOHANG)[0]):
        for number in [number for number, launcher_pid in sandboxes.items() if launcher_pid == pid]:
            del sandboxes[number]

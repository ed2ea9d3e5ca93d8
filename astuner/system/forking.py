"""The loop of a process that forks itself on request. Workers start fast and share the modules it has imported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod

_POLL_SECONDS = 0.5
_PR_SET_NAME = 15

interpreter: tuple[str, ...] = (sys.executable, "-P")
"""The command that runs a Python script. In a worker of Ray that was forked, it has the same server fork a process."""


def name_process(name: str) -> None:
    """Give this process a name of at most 15 bytes, which `ps -e` and `top` show, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


class ForkingServer(ABC):
    """Forks workers on request, and observes how they end.

    Attributes:
        workers: process ids of the workers that have not been reaped.
        is_ending: whether `serve` handles no further request.
    """

    is_ending = False

    def __init__(self, requests: socket.socket, launcher: int) -> None:
        """Prepare this process for forks, after the imports that workers share; `serve` ends with `launcher`."""
        self.requests = requests
        self.workers: set[int] = set()
        self._launcher = launcher
        self._wakeup, self._wakeup_end = os.pipe()
        os.set_blocking(self._wakeup_end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_end, warn_on_full_buffer=False)
        # Collections would write to the shared pages.
        gc.collect()
        gc.freeze()

    @abstractmethod
    def handle_request(self) -> None:
        """Handle one request. At the end of the requests, set `is_ending`."""

    @abstractmethod
    def worker_ended(self, pid: int, code: int) -> None:
        """Handle the end of a worker. `code` is its exit code, or -n after signal n."""

    def tick(self) -> None:  # noqa: B027 optional
        """Do what is due. Called at least twice a second while the process serves."""

    def serve(self) -> None:
        """Handle requests until `is_ending` is set or the parent process ends."""
        while os.getppid() == self._launcher and not self.is_ending:
            self.tick()
            readable, _, _ = select.select([self.requests.fileno(), self._wakeup], [], [], _POLL_SECONDS)
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
                self.reap()
            if self.requests.fileno() in readable:
                self.handle_request()

    def fork(self) -> int:
        """Fork a worker; return its process id, or 0 in the worker. OSError: too many processes, or too little memory.

        The worker has closed the files of the loop.
        """
        pid = os.fork()
        if pid:
            self.workers.add(pid)
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wakeup)
            os.close(self._wakeup_end)
            self.requests.close()
        return pid

    def reap(self) -> None:
        """Handle the ends of all workers that have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self.workers:  # and not an orphan that this process has adopted
                    self.workers.discard(ended[0])
                    self.worker_ended(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def end_workers(self, grace: float) -> None:
        """Wait until all workers have ended, and kill those that remain after `grace` seconds."""
        until = time.monotonic() + grace
        while self.workers:
            self.reap()
            if time.monotonic() >= until:
                for pid in self.workers:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

"""A process that forks itself on request, and its client. Workers start fast and share the modules it has imported."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from typing import Any, NoReturn

_POLL_SECONDS = 0.5
_REQUEST = struct.Struct("!I")
_MAX_DESCRIPTORS = 8
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


class ReportingServer(ForkingServer):
    """Forks a worker for each request of a `ForkClient`, and reports to it how the worker starts and ends."""

    @abstractmethod
    def run_worker(self, *descriptors: int) -> NoReturn:
        """Run a worker in this process, with the descriptors of the request."""

    def serve(self) -> None:
        """Report that this process is ready, then serve."""
        self._report(ready=os.getpid())
        super().serve()

    def handle_request(self) -> None:
        """Fork a worker, unless the client has closed the socket."""
        data, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):  # it has ended without reading all reports
            data, descriptors, _, _ = socket.recv_fds(self.requests, _REQUEST.size, _MAX_DESCRIPTORS)
        if not data:
            self.is_ending = True
            return
        (number,) = _REQUEST.unpack(data)
        try:
            pid = self.fork()
        except OSError as error:
            self._report(failed=number, error=str(error))
        else:
            if pid == 0:
                self.run_worker(*descriptors)
            self._report(started=number, pid=pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def worker_ended(self, pid: int, code: int) -> None:
        """Report how the worker has ended."""
        self._report(ended=pid, code=code)

    def _report(self, **message: int | str) -> None:
        with contextlib.suppress(OSError):  # the client has ended
            self.requests.sendall(json.dumps(message).encode() + b"\n")


class ForkClient:
    """Requests forks from a `ReportingServer`. Used on one event loop.

    Attributes:
        ready: set once the server handles requests, or has ended.
        has_ended: whether the server has ended.
    """

    def __init__(self, control: socket.socket) -> None:
        """Use the socket whose other end the server has."""
        self.ready = asyncio.Event()
        self.has_ended = False
        self._control = control
        self._numbers = itertools.count(1)
        # By the number of the request: the id of the new process, and its exit code to come.
        self._started: dict[int, asyncio.Future[tuple[int, asyncio.Future[int]]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}

    @property
    def running(self) -> list[int]:
        """The process ids of the workers that have not ended."""
        return list(self._exits)

    async def fork(self, *descriptors: int) -> tuple[int, asyncio.Future[int]]:
        """Fork a worker with these descriptors; return its process id, and a future.

        The future's result is the exit code, or -n after signal n. It is cancelled if the server ends first.

        Raises:
            ConnectionError: the server has ended.
            OSError: it cannot fork.
        """
        if self.has_ended:
            raise ConnectionResetError
        number = next(self._numbers)
        socket.send_fds(self._control, [_REQUEST.pack(number)], descriptors)
        started: asyncio.Future[tuple[int, asyncio.Future[int]]] = asyncio.get_running_loop().create_future()
        self._started[number] = started
        return await started

    async def read(self) -> None:
        """Read the server's reports until it ends."""
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(sock=self._control.dup())
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "ready" in message:
                    self.ready.set()
                elif "started" in message:
                    pid, started = message["pid"], self._started.pop(message["started"])
                    exited = self._exits[pid] = loop.create_future()
                    if not started.done():  # else its request was cancelled
                        started.set_result((pid, exited))
                elif "failed" in message:
                    started = self._started.pop(message["failed"])
                    if not started.done():
                        started.set_exception(OSError(message["error"]))
                elif not (exited := self._exits.pop(message["ended"])).done():
                    exited.set_result(message["code"])
        finally:
            self.has_ended = True
            self.ready.set()
            writer.close()
            for started in self._started.values():
                if not started.done():
                    started.set_exception(ConnectionResetError())
            for exited in self._exits.values():
                exited.cancel()

    def close(self) -> None:
        """Have the server end. Thread-safe."""
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)
        self._control.close()

"""Starts worker processes by forking a small process, which has neither threads nor the model.

A worker starts within milliseconds and shares the memory of the imported packages and of the tokenizer. The user's code
is imported by each worker, so that workers share no connection or thread of it. (The fork server of `multiprocessing`
would run the user's main script again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import astuner
from astuner.backbone.training.episode_worker import AgentJob
from astuner.errors import BackboneError

_REQUEST = struct.Struct("!i")
_POLL_SECONDS = 0.5
# Seconds in which workers must exit after the main process has ended. The remaining ones are then killed.
_END_SECONDS = 3.0
_EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class ForkServerJob:
    """Settings of the fork server.

    Attributes:
        agent: the inputs of its workers.
        max_model_len: maximum number of tokens of a request to the engine.
        sys_path: `sys.path` of the main process.
        preload: modules to import before the first fork; they must not start threads.
    """

    agent: AgentJob
    max_model_len: int
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]


def main() -> None:
    """Serve requests until the main process closes the socket or ends. The job is pickled on stdin."""
    requests, replies = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    launcher = os.getppid()
    data = sys.stdin.buffer.read()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - stays open
    os.dup2(sys.stdin.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if data:  # otherwise the main process has ended
        _Server(pickle.loads(data), requests, replies, launcher).serve()


class _Server:
    def __init__(self, job: ForkServerJob, requests: socket.socket, replies: int, launcher: int) -> None:
        from astuner.model_tuner import ChatCodec, load_tokenizer

        sys.path[:] = job.sys_path
        for name in job.preload:
            importlib.import_module(name)
        self._job = job
        self._codec = ChatCodec(load_tokenizer(job.agent.model_path), job.agent.config.model.renderer)
        self._requests = requests
        self._replies = replies
        self._launcher = launcher
        self._workers: set[int] = set()
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakeup)
        # Collections would write to the shared pages.
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        """Start workers on request, and tell how each has ended."""
        while os.getppid() == self._launcher:
            readable, _, _ = select.select([self._requests.fileno(), self._wakeup], [], [], _POLL_SECONDS)
            if self._wakeup in readable:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._requests.fileno() in readable and not self._handle_request():
                break
        self._end_workers()

    def _handle_request(self) -> bool:
        """Handle one request; return False at the end of the requests."""
        data, descriptors, _, _ = socket.recv_fds(self._requests, _REQUEST.size, 2)
        if not data:
            return False
        (number,) = _REQUEST.unpack(data)
        self._send(started=number, pid=self._start(*descriptors))
        return True

    def _start(self, connection: int, crash_file: int) -> int:
        pid = os.fork()
        if pid == 0:
            from astuner.backbone.training.worker_process import serve

            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            os.close(self._replies)
            serve(self._job.agent, self._codec, self._job.max_model_len, connection, crash_file)
        os.close(connection)
        os.close(crash_file)
        self._workers.add(pid)
        return pid

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._workers.discard(ended[0])
                self._send(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))

    def _end_workers(self) -> None:
        until = time.monotonic() + _END_SECONDS
        while self._workers:
            self._reap()
            if time.monotonic() > until:
                for pid in self._workers:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _send(self, **message: int) -> None:
        with contextlib.suppress(OSError):  # the main process has ended
            os.write(self._replies, json.dumps(message).encode() + b"\n")


class ForkServer:
    """The main process's handle of the fork server. Used on one event loop."""

    def __init__(self, job: ForkServerJob) -> None:
        """Start the process, which loads its packages while this one continues."""
        self._requests, requests = socket.socketpair()
        replies, replies_end = os.pipe()
        self._replies = os.fdopen(replies, "rb")
        package = str(Path(astuner.__file__).parents[1])
        python_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with requests:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", __name__, str(requests.fileno()), str(replies_end)),
                env={**os.environ, "PYTHONPATH": python_path},
                stdin=subprocess.PIPE,
                pass_fds=(requests.fileno(), replies_end),
                start_new_session=True,  # Ctrl-C in the terminal ends the main process, which ends the workers
            )
        os.close(replies_end)
        self.has_ended = False
        self.has_started_workers = False
        self._started: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._number = 0
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(pickle.dumps(job))

    async def read_replies(self) -> None:
        """Read replies until the process ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._replies)
        try:
            while line := await reader.readline():
                message: dict[str, Any] = json.loads(line)
                if "started" in message:
                    self.has_started_workers = True
                    self._exits[message["pid"]] = loop.create_future()
                    started = self._started.pop(message["started"])
                    if not started.done():  # the run was interrupted; the worker ends, as its connection is closed
                        started.set_result(message["pid"])
                else:
                    ended = self._exits.pop(message["ended"])
                    if not ended.done():
                        ended.set_result(message["code"])
        finally:
            self.has_ended = True
            transport.close()
            for future in (*self._started.values(), *self._exits.values()):
                future.cancel()

    async def start_worker(self, connection: socket.socket, crash_file: int) -> tuple[int, asyncio.Future[int]]:
        """Fork a worker; return its process id, and a future of its exit code, which is -n after signal n.

        Args:
            connection: the worker's end of its socket.
            crash_file: see `worker_process.serve`.

        Raises:
            BackboneError: the fork server has ended.
        """
        self._number += 1
        started = self._started[self._number] = asyncio.get_running_loop().create_future()
        try:
            request = _REQUEST.pack(self._number)
            socket.send_fds(self._requests, [request], [connection.fileno(), crash_file])
            pid = await started
        except (ConnectionError, asyncio.CancelledError) as error:
            if isinstance(error, ConnectionError):
                self.has_ended = True
            if not self.has_ended:
                raise
            raise BackboneError(
                "the process that starts the episode workers has ended; its output says why. Remove "
                "rollout.isolation: process to run episodes in threads"
            ) from None
        return pid, self._exits[pid]

    def close(self) -> None:
        """End the workers and the process, and wait for it."""
        self._requests.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    main()

"""Starts worker processes by forking a small process, which has neither threads nor the model.

A worker starts within milliseconds and shares the memory of the imported packages and of the tokenizer. The user's code
is imported by each worker, so that workers share none of its connections or threads. (The fork server of
`multiprocessing` would run the user's main script again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import astuner
from astuner.backbone.episode_workers.worker import AgentJob
from astuner.errors import BackboneError
from astuner.system.forking import ForkingServer

_REQUEST = struct.Struct("!i")
# Seconds that workers have to exit after the main process has ended. The remaining ones are then killed.
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
        server = _Server(pickle.loads(data), requests, replies, launcher)
        server.serve()
        server.end_workers(_END_SECONDS)


class _Server(ForkingServer):
    def __init__(self, job: ForkServerJob, requests: socket.socket, replies: int, launcher: int) -> None:
        from astuner.model_tuner import ChatCodec, load_tokenizer

        sys.path[:] = job.sys_path
        for name in job.preload:
            importlib.import_module(name)
        self._job = job
        self._codec = ChatCodec(load_tokenizer(job.agent.model_path), job.agent.config.model.renderer)
        self._replies = replies
        super().__init__(requests, launcher)

    def handle_request(self) -> None:
        """Start a worker, unless the main process has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self.requests, _REQUEST.size, 2)
        if not data:
            self.is_ending = True
            return
        (number,) = _REQUEST.unpack(data)
        connection, crash_file = descriptors
        pid = self.fork()
        if pid == 0:
            from astuner.backbone.episode_workers.process import serve

            os.close(self._replies)
            serve(self._job.agent, self._codec, self._job.max_model_len, connection, crash_file)
        os.close(connection)
        os.close(crash_file)
        self._send(started=number, pid=pid)

    def worker_ended(self, pid: int, code: int) -> None:
        """Tell the main process how the worker has ended."""
        self._send(ended=pid, code=code)

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
            crash_file: see `process.serve`.

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

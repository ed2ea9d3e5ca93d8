"""Starts worker processes by forking a process that has neither threads nor the model.

A worker starts within milliseconds and shares the memory of the imported packages and of the tokenizer. The user's code
is imported by each worker, so that workers share none of its connections or threads. (The fork server of
`multiprocessing` would run the user's main script again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from loguru import logger

import astuner
from astuner.backbone.episode_workers.worker import AgentJob
from astuner.debugging.deadlines import CLOCK_THREAD
from astuner.errors import BackboneError
from astuner.model_tuner import ChatCodec
from astuner.system.forking import ForkingServer, name_process
from astuner.system.redaction.redactor import stop_listening

# They wait nearly always, and a fork starts them again when it needs them.
_WAITING_THREADS = {CLOCK_THREAD, "tqdm_monitor"}
SERVER_NAME = "astuner-forks"
"""Name of the fork server's process."""
_REQUEST = struct.Struct("!i")
# Seconds that workers have to exit after the main process has ended. The remaining ones are then killed.
_END_SECONDS = 3.0
_EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class ForkServerJob:
    """Settings of the fork server.

    Attributes:
        agent: the inputs of its workers.
        sys_path: `sys.path` of the main process.
        preload: modules to import before the first fork.
    """

    agent: AgentJob
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]


def main() -> None:
    """Serve requests until the main process closes the socket or ends. The job is pickled on stdin."""
    data = sys.stdin.buffer.read()
    if data:  # otherwise the main process has ended
        from astuner.model_tuner import load_tokenizer

        job: ForkServerJob = pickle.loads(data)
        sys.path[:] = job.sys_path
        codec = ChatCodec(load_tokenizer(job.agent.model_path), job.agent.config.model.renderer)
        _serve(job, codec, os.getppid(), socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


def _serve(job: ForkServerJob, codec: ChatCodec, launcher: int, requests: socket.socket, replies: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - stays open
    os.dup2(sys.stdin.fileno(), 0)
    for name in job.preload:
        with contextlib.suppress(Exception):  # the worker that imports the agent reports it
            importlib.import_module(name)
    name_process(SERVER_NAME)
    server = _Server(job, codec, requests, replies, launcher)
    server.serve()
    server.end_workers(_END_SECONDS)


class _Server(ForkingServer):
    def __init__(
        self, job: ForkServerJob, codec: ChatCodec, requests: socket.socket, replies: int, launcher: int
    ) -> None:
        self._job = job
        self._codec = codec
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
            serve(self._job.agent, self._codec, connection, crash_file)
        os.close(connection)
        os.close(crash_file)
        self._send(started=number, pid=pid)

    def worker_ended(self, pid: int, code: int) -> None:
        """Tell the main process how the worker has ended."""
        self._send(ended=pid, code=code)

    def _send(self, **message: int) -> None:
        with contextlib.suppress(OSError):  # the main process has ended
            os.write(self._replies, json.dumps(message).encode() + b"\n")


def _can_fork() -> bool:
    """Return whether a fork of this process can be the fork server: it has no other threads, and has used no GPU."""
    others = {each.name for each in threading.enumerate()} - _WAITING_THREADS
    torch: Any = sys.modules.get("torch")
    return others == {threading.main_thread().name} and not (torch and torch.cuda.is_initialized())


def _forked(job: ForkServerJob, codec: ChatCodec, requests: socket.socket, replies: int) -> int:
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_server(requests.fileno(), replies)
            _serve(job, codec, launcher, requests, replies)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    return pid


def _become_server(requests: int, replies: int) -> None:
    """Leave behind what belongs to the main process, from which this process has been forked."""
    # Finalisers of the main process's files and sockets must not run: they would close other files by now.
    gc.freeze()
    gc.enable()
    kept = sorted((2, requests, replies))
    for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first + 1, last)
    os.setsid()  # Ctrl-C in the terminal ends the main process, which ends the workers
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    stop_listening()
    logger.remove()
    logger.add(sys.stderr, diagnose=False)
    # The threads of its earlier operations do not exist here. Workers share the processors.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _spawned(job: ForkServerJob, requests: socket.socket, replies: int) -> int:
    package = str(Path(astuner.__file__).parents[1])
    python_path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as file:
        file.write(pickle.dumps(job))
        file.seek(0)
        for descriptor in (requests.fileno(), replies):
            os.set_inheritable(descriptor, True)
        return os.posix_spawn(
            sys.executable,
            (sys.executable, "-P", "-m", __name__, str(requests.fileno()), str(replies)),
            {**os.environ, "PYTHONPATH": python_path},
            file_actions=[(os.POSIX_SPAWN_DUP2, file.fileno(), 0)],
            setsid=True,  # as in `_become_server`
        )


class ForkServer:
    """The main process's handle of the fork server. Used on one event loop."""

    def __init__(self, job: ForkServerJob, codec: ChatCodec) -> None:
        """Start the process.

        Args:
            job: its settings.
            codec: the codec of the run's model.
        """
        self._requests, requests = socket.socketpair()
        replies, replies_end = os.pipe()
        self._replies = os.fdopen(replies, "rb")
        with requests:
            forks = _can_fork()
            pid = _forked(job, codec, requests, replies_end) if forks else _spawned(job, requests, replies_end)
        self._process = psutil.Process(pid)  # before anything else can wait for it
        os.close(replies_end)
        self.has_ended = False
        self.has_started_workers = False
        self._started: dict[int, asyncio.Future[int]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._number = 0

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
        except psutil.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    main()

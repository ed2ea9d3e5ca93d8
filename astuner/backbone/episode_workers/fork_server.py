"""Starts worker processes by forking a process that has neither threads nor the model.

A worker starts within milliseconds and shares the imported packages' and the tokenizer's memory. The user's code is
imported by each worker, so that workers share none of its connections or threads. (The fork server of `multiprocessing`
would run the user's main script again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import pickle
import pkgutil
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil
from loguru import logger

from astuner.backbone.episode_workers.messages import AgentJob
from astuner.debugging.deadlines import CLOCK_THREAD
from astuner.errors import BackboneError
from astuner.model_tuner.codec import ChatCodec
from astuner.system import forking
from astuner.system.forking import ForkingServer, name_process
from astuner.system.paths import python_path
from astuner.system.process_tree import (
    GRACE_SECONDS,
    adopt_orphans,
    child_pids,
    end_processes,
    find_process,
    with_descendants,
)
from astuner.system.redaction.redactor import stop_listening

# They wait nearly always, and a fork starts them again when it needs them.
_WAITING_THREADS = {CLOCK_THREAD, "tqdm_monitor"}
SERVER_NAME = "astuner-forks"
"""Name of the fork server's process."""
_REQUEST = struct.Struct("!i")
# The streams of the main process, of which a fork has a copy. Their end would write its text a second time.
_streams: list[Any] = []
# Seconds that workers have to exit after the main process has ended. The remaining ones are then killed.
_END_SECONDS = GRACE_SECONDS + 3.0
_EXIT_SECONDS = 10.0


@dataclass(frozen=True)
class ForkServerJob:
    """Settings of the fork server. It imports `preload` (see `imported_packages`) before the first fork."""

    agent: AgentJob
    sys_path: tuple[str, ...]
    preload: tuple[str, ...]


def main() -> None:
    """Serve requests until the main process closes the socket or ends.

    The job is pickled on stdin. Stdout is the socket, whose first message has the other descriptors.
    """
    from astuner.model_tuner.codec import load_tokenizer

    requests = socket.socket(fileno=os.dup(1))
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
    if not descriptors:
        return  # the main process has ended
    replies, stdout = descriptors
    os.dup2(stdout, 1)
    os.close(stdout)
    job: ForkServerJob = pickle.loads(sys.stdin.buffer.read())
    sys.path[:] = job.sys_path
    codec = ChatCodec(load_tokenizer(job.agent.model_path), job.agent.config.model.renderer)
    _serve(job, codec, os.getppid(), requests, replies)


def _serve(job: ForkServerJob, codec: ChatCodec, launcher: int, requests: socket.socket, replies: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - stays open
    os.dup2(sys.stdin.fileno(), 0)
    for name in job.preload:
        with contextlib.suppress(Exception):  # the worker that imports the agent reports it
            pkgutil.resolve_name(name)
    name_process(SERVER_NAME)
    server = _Server(job, codec, requests, replies, launcher)
    server.serve()
    if job.agent.limits is not None:  # first, because this process may be killed; the main one removes it, too
        shutil.rmtree(job.agent.limits, ignore_errors=True)
    server.end_workers(_END_SECONDS)
    server.end_orphans()


class _Server(ForkingServer):
    def __init__(
        self, job: ForkServerJob, codec: ChatCodec, requests: socket.socket, replies: int, launcher: int
    ) -> None:
        self._job = job
        self._codec = codec
        self._replies = replies
        # Until when the processes that lost workers have left have to end.
        self._orphans: dict[psutil.Process, float] = {}
        adopt_orphans()
        # Here, because the main process does not need what runs episodes, and the workers share it.
        from astuner.backbone.episode_workers.process import serve
        from astuner.task_rollout.process_settings import ProcessSettings

        self._run_worker = serve
        ProcessSettings.share_modules()
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
            os.close(self._replies)
            self._run_worker(self._job.agent, self._codec, connection, crash_file)
        os.close(connection)
        os.close(crash_file)
        self._send(started=number, pid=pid)

    def worker_ended(self, pid: int, code: int) -> None:
        """Tell the main process how the worker has ended, and end the processes that its episode has left."""
        self._send(ended=pid, code=code)
        self._terminate_left()

    def tick(self) -> None:
        """Kill the processes that have not ended in time, and those that they have started."""
        late = [process for process, end in self._orphans.items() if time.monotonic() >= end]
        for process in with_descendants(late):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in late:
            del self._orphans[process]
        if late:
            self._terminate_left()

    def _terminate_left(self) -> None:
        for process in self._left():
            if process not in self._orphans:
                self._orphans[process] = time.monotonic() + GRACE_SECONDS
                with contextlib.suppress(psutil.Error):
                    process.terminate()

    def end_orphans(self) -> None:
        """End the processes that workers have left."""
        end_processes(self._left, GRACE_SECONDS)

    def _left(self) -> set[psutil.Process]:
        """Return the running processes that workers have left, which this process has adopted."""
        orphans = [find_process(pid) for pid in child_pids(os.getpid()) if pid not in self.workers]
        return with_descendants(filter(None, orphans))

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
    # The streams may have other descriptors than the standard ones, or contain text that is not yet written.
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if (stream := getattr(sys, name)) is not None:
            _streams.append(stream)
            opened = open(fd, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 stays open
            setattr(sys, name, opened)
    if sys.stderr is not None:
        logger.add(sys.stderr, diagnose=False)
    # The threads of its earlier operations do not exist here. Workers share the processors.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _spawned(job: ForkServerJob, requests: socket.socket) -> int:
    job_end, own_end = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            (*forking.interpreter, __file__),
            {**os.environ, "PYTHONPATH": python_path()},
            file_actions=[(os.POSIX_SPAWN_DUP2, job_end, 0), (os.POSIX_SPAWN_DUP2, requests.fileno(), 1)],
            setsid=True,  # as in `_become_server`
        )
    finally:
        os.close(job_end)
    # The process reads the job after its imports, and this one continues meanwhile.
    threading.Thread(target=_write, args=(own_end, pickle.dumps(job)), name="job", daemon=True).start()
    return pid


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as file:  # the process may have ended
        file.write(data)


class ForkServer:
    """The main process's handle of the fork server. Used on one event loop."""

    def __init__(self, job: ForkServerJob, codec: ChatCodec | None) -> None:
        """Start the process: a fork of this one if possible, which needs the `codec` for the run's model."""
        self._requests, requests = socket.socketpair()
        replies, replies_end = os.pipe()
        self._replies = os.fdopen(replies, "rb")
        with requests:
            if codec is not None and _can_fork():
                pid = _forked(job, codec, requests, replies_end)
            else:
                pid = _spawned(job, requests)
                socket.send_fds(self._requests, [b"f"], [replies_end, 1])
        self._process = psutil.Process(pid)  # before anything else can wait for it
        os.close(replies_end)
        self.has_ended = False
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

        `connection` is the worker's end of its socket; `crash_file`: see `process.serve`. BackboneError: the
        server has ended.
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
                "the process that starts the episode workers has ended; its output says why. "
                "--backbone=debug astuner.debug.debug_max_parallel=1 runs episodes without it"
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

"""Starts worker processes by forking a process that has neither threads nor the model.

A worker starts within milliseconds and shares the imported packages' and the tokenizer's memory. The user's code is
imported by each worker, so that workers share none of its connections or threads. (The fork server of `multiprocessing`
would run the user's main script again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import pkgutil
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil
from loguru import logger

from astuner.backbone.episode_workers.messages import AgentJob
from astuner.debugging.deadlines import CLOCK_THREAD
from astuner.errors import BackboneError
from astuner.model_tuner.codec import ChatCodec
from astuner.system import forking
from astuner.system.child_process import wait_or_kill
from astuner.system.forking import ForkClient, ReportingServer, name_process
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

    The job is pickled on stdin. Stdout is the socket, whose first message has the descriptor of the output.
    """
    from astuner.model_tuner.codec import load_tokenizer

    requests = socket.socket(fileno=os.dup(1))
    _, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
    if not descriptors:
        return  # the main process has ended
    (stdout,) = descriptors
    os.dup2(stdout, 1)
    os.close(stdout)
    job: ForkServerJob = pickle.loads(sys.stdin.buffer.read())
    sys.path[:] = job.sys_path
    codec = ChatCodec(load_tokenizer(job.agent.model_path), job.agent.config.model.renderer)
    _serve(job, codec, os.getppid(), requests)


def _serve(job: ForkServerJob, codec: ChatCodec, launcher: int, requests: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - stays open
    os.dup2(sys.stdin.fileno(), 0)
    for name in job.preload:
        with contextlib.suppress(Exception):  # the worker that imports the agent reports it
            pkgutil.resolve_name(name)
    name_process(SERVER_NAME)
    server = _Server(job, codec, requests, launcher)
    server.serve()
    if job.agent.limits is not None:  # first, because this process may be killed; the main one removes it, too
        shutil.rmtree(job.agent.limits, ignore_errors=True)
    server.end_workers(_END_SECONDS)
    server.end_orphans()


class _Server(ReportingServer):
    def __init__(self, job: ForkServerJob, codec: ChatCodec, requests: socket.socket, launcher: int) -> None:
        self._job = job
        self._codec = codec
        # Until when the processes that lost workers have left have to end.
        self._orphans: dict[psutil.Process, float] = {}
        adopt_orphans()
        # Here, because the main process does not need what runs episodes, and the workers share it.
        from astuner.backbone.episode_workers.process import serve
        from astuner.task_rollout.process_settings import ProcessSettings

        self._run_worker = serve
        ProcessSettings.share_modules()
        super().__init__(requests, launcher)

    def run_worker(self, *descriptors: int) -> NoReturn:
        """Run episodes, with the worker's socket and the file for its stacks."""
        self._run_worker(self._job.agent, self._codec, *descriptors)

    def worker_ended(self, pid: int, code: int) -> None:
        """Report how the worker has ended, and end the processes that its episode has left."""
        super().worker_ended(pid, code)
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


def _can_fork() -> bool:
    """Return whether a fork of this process can be the fork server: it has no other threads, and has used no GPU."""
    others = {each.name for each in threading.enumerate()} - _WAITING_THREADS
    torch: Any = sys.modules.get("torch")
    return others == {threading.main_thread().name} and not (torch and torch.cuda.is_initialized())


def _forked(job: ForkServerJob, codec: ChatCodec, requests: socket.socket) -> int:
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_server(requests.fileno())
            _serve(job, codec, launcher, requests)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    return pid


def _become_server(requests: int) -> None:
    """Leave behind what belongs to the main process, from which this process has been forked."""
    # Finalisers of the main process's files and sockets must not run: they would close other files by now.
    gc.freeze()
    gc.enable()
    os.closerange(3, requests)
    os.closerange(requests + 1, os.sysconf("SC_OPEN_MAX"))
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
        control, requests = socket.socketpair()
        with requests:
            if codec is not None and _can_fork():
                pid = _forked(job, codec, requests)
            else:
                pid = _spawned(job, requests)
                socket.send_fds(control, [b"f"], [1])
        self._process = psutil.Process(pid)  # before anything else can wait for it
        self._client = ForkClient(control)
        self.read_reports = self._client.read

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._client.has_ended

    async def start_worker(self, connection: socket.socket, crash_file: int) -> tuple[int, asyncio.Future[int]]:
        """Fork a worker; return its process id, and a future of its exit code, which is -n after signal n.

        `connection` is the worker's end of its socket; `crash_file`: see `process.serve`. BackboneError: the
        server has ended, or cannot fork.
        """
        try:
            return await self._client.fork(connection.fileno(), crash_file)
        except ConnectionError as error:
            raise BackboneError(
                "the process that starts the episode workers has ended; its output says why. "
                "--backbone=debug astuner.debug.debug_max_parallel=1 runs episodes without it"
            ) from error
        except OSError as error:
            raise BackboneError(
                f"an episode worker could not be started: {error}. Lower rollout.max_env_worker, or raise the limit of "
                "processes (ulimit -u)"
            ) from error

    def close(self) -> None:
        """End the workers and the process, and wait for it."""
        self._client.close()
        wait_or_kill(self._process, _EXIT_SECONDS)


if __name__ == "__main__":
    main()

"""Forks Ray's workers from a process that has imported their modules.

A verl or Trinity worker imports PyTorch, transformers and the trainer, which takes 6 to 8 seconds of processor time. A
run starts 6 to 9 of them. The server imports these modules once, while the main process prepares the run, and the
workers share their memory. Ray starts the workers itself: `WorkerServer.executable` is the `py_executable` of its
runtime environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loguru import logger

from astuner.backbone.ray_cluster import worker_client
from astuner.backbone.ray_cluster.environment import short_parent
from astuner.system import forking
from astuner.system.child_process import start_module
from astuner.system.forking import ForkingServer
from astuner.system.paths import python_path

# Workers end when Ray does. Those that remain so long after the main process has ended are killed.
_END_SECONDS = 5.0
# A client sends its request at once, unless it is stopped.
_RECEIVE_SECONDS = 2.0
# Ray's setting for workers without reserved CPUs. It has no effect in a process that has imported PyTorch.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class WorkerServer:
    """The main process's handle of the server. Ray starts its workers with `executable`."""

    def __init__(self, folder: Path, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process in a folder with a short path; it imports the modules while this one continues.

        The modules must not start threads, nor import Ray, which reads variables at its import that differ
        between workers.
        """
        path, self._errors = folder / "workers", folder / "errors"
        threads = {name: value for name, value in _ONE_THREAD.items() if name not in os.environ}
        path_of_workers = python_path(environment.get("PYTHONPATH"))
        with socket.socket(socket.AF_UNIX) as listener, self._errors.open("wb") as errors:
            listener.bind(str(path))
            listener.listen(128)
            self._process = start_module(
                __name__,
                str(listener.fileno()),
                *modules,
                env={**threads, **environment, "PYTHONPATH": path_of_workers},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal must not end it
            )
        self.executable = shlex.join(_fork_command(str(path)))

    def close(self) -> None:
        """End the process and its workers. Log a warning if it has ended before, so that workers were not forked."""
        if self._process.poll() is not None:
            lines = self._errors.read_text(errors="replace").splitlines() or ["it was killed"]
            logger.warning("Ray's workers could not share imported modules, so they started slowly: {}", lines[-1])
        self._process.terminate()
        self._process.wait()


def _fork_command(path: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", worker_client.__file__, path)


def can_fork_workers(device: str) -> bool:
    """Return whether workers that compute on a device (`cpu` or `cuda`) may be forked on this platform.

    A process that has used a GPU cannot be forked, and macOS does not support forks without an exec.
    """
    return device == "cpu" and sys.platform == "linux"


@contextlib.contextmanager
def worker_server(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[WorkerServer]:
    """Run a server during the block; see `WorkerServer`."""
    with tempfile.TemporaryDirectory(prefix="astuner-workers-", dir=short_parent()) as folder:
        server = WorkerServer(Path(folder), modules, environment)
        try:
            yield server
        finally:
            server.close()


def use_configured_threads() -> None:
    """Let PyTorch compute with the threads of OMP_NUM_THREADS. Ray sets it when an actor starts.

    A process that imports PyTorch afterwards needs no call. A forked one has imported it before.
    """
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))


def main() -> None:
    """Import the modules and serve requests until the main process ends or terminates this one."""
    launcher, listener = os.getppid(), socket.socket(fileno=int(sys.argv[1]))
    folder = Path(listener.getsockname()).parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    forking.interpreter = _fork_command(listener.getsockname())
    if "ray" in sys.modules:
        raise RuntimeError(f"one of the modules imports ray: {', '.join(sys.argv[2:])}")
    server = _Server(listener, launcher)
    server.serve()
    listener.close()  # clients that come later become ordinary workers
    server.end_workers(0.0 if server.is_ending else _END_SECONDS)
    # The main process removes it unless it was killed.
    shutil.rmtree(folder, ignore_errors=True)


class _Server(ForkingServer):
    def __init__(self, listener: socket.socket, launcher: int) -> None:
        super().__init__(listener, launcher)
        self._connections: dict[int, socket.socket] = {}
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: Any) -> None:
        self.is_ending = True

    def handle_request(self) -> None:
        """Fork a worker for a client that connects. A client that is not answered becomes an ordinary worker."""
        connection, _ = self.requests.accept()
        connection.settimeout(_RECEIVE_SECONDS)
        descriptors: list[int] = []
        pid = 0
        try:
            with contextlib.suppress(OSError, ValueError):  # the client was killed or stopped, or there is no memory
                request = _receive(connection, descriptors)
                # Ray kills the client of a worker that takes too long to start. It sends nothing after its request.
                if not select.select([connection], [], [], 0)[0]:
                    pid = self._start(connection, request, descriptors)
                    connection.sendall(b"f")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if not pid:
                connection.close()

    def _start(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        pid = self.fork()
        if pid == 0:
            own, descriptors[:] = [*descriptors], []  # the worker closes them
            try:
                for open_socket in (connection, *self._connections.values()):
                    open_socket.close()
                _become_worker(request["argv"], request["env"], request["cwd"], own)
            # The handlers of the server must not catch an error of the worker.
            except (OSError, ValueError):
                traceback.print_exc()
                os._exit(1)
        self._connections[pid] = connection
        return pid

    def worker_ended(self, pid: int, code: int) -> None:
        """Send the exit code to the client, which ends with it."""
        with self._connections.pop(pid) as connection, contextlib.suppress(OSError):
            connection.sendall(bytes([code & 255]))


def _receive(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Return a client's request, and append its standard input, output and error to `descriptors`."""
    until = time.monotonic() + _RECEIVE_SECONDS
    length, received, _, _ = socket.recv_fds(connection, 4, 3)
    descriptors += received
    size, text = int.from_bytes(length, "big"), bytearray()
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
        connection.settimeout(max(until - time.monotonic(), 0.001))
    request: dict[str, Any] = json.loads(text)
    return request


def _become_worker(argv: list[str], env: Mapping[str, str], cwd: str, descriptors: Sequence[int]) -> NoReturn:
    """Run a script in this forked process, as `python ARGV` does in a new one, with these standard descriptors."""
    os.setsid()  # at a worker's end, Ray kills its process group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(env)
    # A new interpreter starts with these folders.
    paths = [str(Path(argv[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    sys.argv = argv
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # the other workers have its state as well; `random` sees to this at a fork
    try:
        os.chdir(cwd)
        runpy.run_path(argv[0], run_name="__main__")
    # Printed, as by an interpreter; the server's own handlers must not see it.
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


if __name__ == "__main__":
    main()

"""This process's server that forks sandboxes: starts it on first use, and sends it requests."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from astuner.errors import SandboxError
from astuner.system.process_tree import kept_pids

# Python keeps an imported file's compiled code, and not that of a file that it runs by its path.
_SERVE = "import sys; sys.path.append(sys.argv[1]); import fork_server; sys.path.pop(); fork_server.serve()"
_REQUEST = struct.Struct("=cQ")
_SECONDS_TO_END = 5


class SandboxServer:
    """A process that forks sandboxes (see `fork_server`). Thread-safe. A server that has ended is replaced."""

    def __init__(self) -> None:
        """Start no process yet."""
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(self, descriptors: tuple[int, int, int, int], env: Mapping[str, str]) -> int:
        """Start a sandbox; return its number.

        Args:
            descriptors: a file with the job, and the ends of pipes for the program's stdout, stderr and report.
            env: variables of the server, if it has to be started.

        Raises:
            SandboxError: the server cannot be started.
        """
        number = next(self._numbers)
        with self._lock:
            for _ in range(2):
                if self._requests is None:
                    self._start_server(env)
                assert self._requests is not None
                with contextlib.suppress(ConnectionError):  # it was killed
                    socket.send_fds(self._requests, [_REQUEST.pack(b"r", number)], descriptors)
                    return number
                self._close()
        raise SandboxError("the process that starts programs ended at once; check the memory and `ulimit -u`")

    def end(self, number: int) -> None:
        """End a sandbox, if it runs."""
        with self._lock, contextlib.suppress(ConnectionError):  # sandboxes end with their server
            if self._requests is not None:
                self._requests.sendall(_REQUEST.pack(b"e", number))

    def close(self) -> None:
        """End the server and its sandboxes. The next request starts another server."""
        with self._lock:
            self._close()

    def forget(self) -> None:
        """Leave the server to the parent process, in a fork of this process."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # its parent waits for it
        if self._requests is not None:
            self._requests.close()
        self._process = self._requests = None

    def _start_server(self, env: Mapping[str, str]) -> None:
        own, other = socket.socketpair()
        bytecode = ["-B"] if sys.dont_write_bytecode else []
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-u", *bytecode, "-c", _SERVE, str(Path(__file__).parent)],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the run, which then ends the server
            )
        except OSError as error:
            own.close()
            raise SandboxError(f"{sys.executable} cannot be started: {error}") from error
        finally:
            other.close()
        kept_pids.add(self._process.pid)
        self._requests = own

    def _close(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            try:
                self._process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            kept_pids.discard(self._process.pid)
        self._process = self._requests = None


server = SandboxServer()
os.register_at_fork(after_in_child=server.forget)
atexit.register(server.close)

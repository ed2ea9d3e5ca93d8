"""Warm vLLM servers, which keep running between debug runs (`--keep-engine`).

A state file per port describes the server. Since it may be stale, it is always checked against the running processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from astuner.errors import ServiceError
from astuner.llm_engine.vllm_server.settings import VllmSettings
from astuner.system.process_tree import end_processes, group_members

GRACE_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL. vLLM stops several processes one after another."""
_GUARD = "astuner.processes.guard"
_START_TIME_TOLERANCE = 2.0
_HTTP_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process, even if its pid is reused later.

    Attributes:
        started: start time, in seconds since the epoch.
    """

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process."""
        return cls(pid, psutil.Process(pid).create_time())

    def runs(self, word: str) -> bool:
        """Return whether the process runs, belongs to this user, and has `word` in its command line."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.started) < _START_TIME_TOLERANCE
                and process.status() != psutil.STATUS_ZOMBIE
                and process.uids().real == os.getuid()
                and word in process.cmdline()
            )
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True)
class WarmServer:
    """A server that keeps running after the run that started it.

    Attributes:
        settings: settings that it was started with.
        server: its main process, which leads the process group.
        guard: the process that stops it.
    """

    settings: VllmSettings
    server: ProcessId
    guard: ProcessId
    log: Path

    def lives(self) -> bool:
        """Return whether the server runs. The state file may be older than the last reboot."""
        return self.server.runs(self.settings.name)

    def stop(self) -> None:
        """Stop all processes of the server, and remove its state file. Processes that reuse a pid are not touched."""
        if self.guard.runs(_GUARD):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.guard.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS + 10
            while (self.guard.runs(_GUARD) or group_members(self.server.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.lives():  # the guard was killed
            end_processes(lambda: group_members(self.server.pid), GRACE_SECONDS)
        _state_file(self.settings.port).unlink(missing_ok=True)

    def write(self) -> None:
        """Write the state file."""
        path = _state_file(self.settings.port)
        text = json.dumps(asdict(self) | {"log": str(self.log)}, indent=1)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)


def warm_server(port: int) -> WarmServer | None:
    """Return the warm server on a port, or None. A stale or unreadable state file is removed."""
    path = _state_file(port)
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        server = WarmServer(
            VllmSettings(**state["settings"]),
            ProcessId(**state["server"]),
            ProcessId(**state["guard"]),
            Path(state["log"]),
        )
    except (OSError, ValueError, KeyError, TypeError):  # missing, or written by another version
        server = None
    if server is not None and server.settings.port == port and server.lives():
        return server
    path.unlink(missing_ok=True)
    return None


def warm_ports() -> list[int]:
    """Return the ports that have a state file."""
    return sorted(int(path.stem) for path in engines_folder().glob("*.json") if path.stem.isdigit())


def log_file(port: int) -> Path:
    """Return the log file of the warm server on a port."""
    return engines_folder() / f"{port}.log"


def engines_folder() -> Path:
    """Return the folder of state files and logs in the user's cache. Only the user can read it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astuner" / "engines"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def is_ready(settings: VllmSettings) -> bool:
    """Return whether a server with exactly these settings is ready on its port."""
    try:
        # trust_env=False: proxies of the environment do not apply to this machine.
        with httpx.Client(base_url=settings.address, timeout=_HTTP_TIMEOUT_SECONDS, trust_env=False) as client:
            if client.get("/health").status_code != 200:
                return False
            models = client.get("/v1/models").json()["data"]
            return any(model["id"] == settings.name for model in models)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


class PortLock:
    """A file lock on a port, so that no server is stopped while a run uses it, or started twice."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._fd = os.open(engines_folder() / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def lock(self, *, exclusive: bool) -> None:
        """Take a shared lock, to use the server, or an exclusive one, to start or stop it; or exchange them.

        Raises:
            ServiceError: another run uses the server, or is starting or stopping it.
        """
        operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            state = "is in use by" if exclusive else "is being started or stopped by"
            raise ServiceError(
                f"the vLLM server on port {self._port} {state} another run; wait until that run has ended, or choose "
                "another debug.debug_vllm_port"
            ) from None

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


@contextlib.contextmanager
def port_lock(port: int) -> Iterator[PortLock]:
    """Hold a shared lock on a port during the block.

    Raises:
        ServiceError: another run is starting or stopping the server on this port.
    """
    lock = PortLock(port)
    try:
        lock.lock(exclusive=False)
        yield lock
    finally:
        lock.release()


def stop_warm_servers() -> list[WarmServer]:
    """Stop all warm servers and return them.

    Raises:
        ServiceError: a run uses one of the servers.
    """
    stopped = []
    for port in warm_ports():
        with port_lock(port) as lock:
            lock.lock(exclusive=True)
            server = warm_server(port)
            if server is not None:
                server.stop()
                stopped.append(server)
    return stopped


def _state_file(port: int) -> Path:
    return engines_folder() / f"{port}.json"

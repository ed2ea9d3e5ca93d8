"""Servers that stay warm between debug runs: what is known of them, checked against what runs, and their end."""

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

from astuner.backbone.vllm_server.settings import VllmSettings
from astuner.errors import ServiceError
from astuner.processes.group import end_group, living

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL; vLLM has several processes to end, one after another."""
_GUARD = "astuner.processes.guard"
_CLOCK_SECONDS = 2.0
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be taken for a later one of the same number.

    Attributes:
        pid: its number.
        started: seconds since the epoch.
    """

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identify a living process."""
        return cls(pid, psutil.Process(pid).create_time())

    def runs(self, word: str) -> bool:
        """Whether it lives, is this user's, and has `word` in its command line."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.started) < _CLOCK_SECONDS
                and process.status() != psutil.STATUS_ZOMBIE
                and process.uids().real == os.getuid()
                and word in process.cmdline()
            )
        except psutil.Error:
            return False


@dataclass(frozen=True, slots=True)
class KeptServer:
    """A server that outlives the run that started it.

    Attributes:
        settings: what it was started with.
        server: its first process, which leads its group.
        guard: the process that ends it.
        log: what it prints.
    """

    settings: VllmSettings
    server: ProcessId
    guard: ProcessId
    log: Path

    def lives(self) -> bool:
        """Whether it runs; the file about it may be older than a restart of the machine."""
        return self.server.runs(self.settings.name)

    def stop(self) -> None:
        """End all of it; what is no longer the same process is left alone."""
        if self.guard.runs(_GUARD):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.guard.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS + 10
            while (self.guard.runs(_GUARD) or living(self.server.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.lives():  # the guard was killed
            end_group(self.server.pid, GRACE_SECONDS)
        _state_file(self.settings.port).unlink(missing_ok=True)

    def write(self) -> None:
        """Note it for later runs."""
        path = _state_file(self.settings.port)
        text = json.dumps(asdict(self) | {"log": str(self.log)}, indent=1)
        beside = path.with_suffix(".tmp")
        beside.write_text(text)
        beside.replace(path)


def kept_server(port: int) -> KeptServer | None:
    """The server that is kept on a port; a note about one that is gone is removed."""
    path = _state_file(port)
    kept = _read(path)
    if kept is not None and kept.settings.port == port and kept.lives():
        return kept
    path.unlink(missing_ok=True)
    return None


def kept_ports() -> list[int]:
    """The ports on which servers have been kept."""
    return sorted(int(path.stem) for path in engines_folder().glob("*.json") if path.stem.isdigit())


def log_file(port: int) -> Path:
    """Where the kept server of a port prints to."""
    return engines_folder() / f"{port}.log"


def engines_folder() -> Path:
    """The folder of the notes, in the user's cache, for the user alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "astuner" / "engines"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def answers(settings: VllmSettings) -> bool:
    """Whether a server with these very settings is ready on its port."""
    try:
        # A proxy of the environment is not on the way to this machine.
        with httpx.Client(base_url=settings.address, timeout=_ANSWER_SECONDS, trust_env=False) as client:
            if client.get("/health").status_code != 200:
                return False
            models = client.get("/v1/models").json()["data"]
            return any(model["id"] == settings.name for model in models)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


class PortLock:
    """Keeps a server from being ended while a run uses it, and two runs from starting one at the same time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._fd = os.open(engines_folder() / f"{port}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def share(self) -> None:
        """Use the server, with others.

        Raises:
            ServiceError: another run is starting or ending it.
        """
        self._take(fcntl.LOCK_SH, "is being started or stopped by")

    def own(self) -> None:
        """Start or end the server.

        Raises:
            ServiceError: another run uses it.
        """
        self._take(fcntl.LOCK_EX, "is in use by")

    def release(self) -> None:
        """Let others have it."""
        os.close(self._fd)

    def _take(self, how: int, what: str) -> None:
        try:
            fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError(
                f"the vLLM server on port {self._port} {what} another run; wait until that has ended, or choose "
                "another debug.debug_vllm_port"
            ) from None


@contextlib.contextmanager
def port_lock(port: int) -> Iterator[PortLock]:
    """A shared lock during the block.

    Raises:
        ServiceError: another run is starting or ending the server of this port.
    """
    lock = PortLock(port)
    try:
        lock.share()
        yield lock
    finally:
        lock.release()


def stop_kept_servers() -> list[KeptServer]:
    """End every kept server; return them.

    Raises:
        ServiceError: a run uses one.
    """
    stopped = []
    for port in kept_ports():
        with port_lock(port) as lock:
            lock.own()
            kept = kept_server(port)
            if kept is not None:
                kept.stop()
                stopped.append(kept)
    return stopped


def _state_file(port: int) -> Path:
    return engines_folder() / f"{port}.json"


def _read(path: Path) -> KeptServer | None:
    """What a note says; None where it says nothing that this version understands."""
    try:
        noted: dict[str, Any] = json.loads(path.read_text())
        return KeptServer(
            VllmSettings(**noted["settings"]),
            ProcessId(**noted["server"]),
            ProcessId(**noted["guard"]),
            Path(noted["log"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None

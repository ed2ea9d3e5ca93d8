"""One service of a run: started, waited for, watched, started again if asked, ended."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from loguru import logger

from astuner.config.services import BUILT_IN_SERVICES, HealthConfig, ServiceConfig
from astuner.errors import ServiceError
from astuner.ports import holder, is_taken
from astuner.processes.guarded_process import GuardedProcess, OwnFolder
from astuner.processes.log import ProcessLog
from astuner.run_record import redact_argv

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_POLL_SECONDS = 0.1
_PROBE_SECONDS = 2.0
_LIFE_SIGN_SECONDS = 1.0
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# What lived so long did not end of its start.
_STEADY_SECONDS = 300.0


class Service:
    """A declared service. `start`, then `stop`; `ask_to_stop` lets several stop at the same time."""

    def __init__(self, name: str, config: ServiceConfig, cwd: Path, own_tmp: OwnFolder | None = None) -> None:
        """Prepare it.

        Args:
            name: after `--with-`.
            config: what to start.
            cwd: in this folder.
            own_tmp: give it a folder for temporary files of its own.
        """
        self.name = name
        self.config = config
        self.log = ProcessLog(name)
        self._cwd = cwd
        self._own_tmp = own_tmp
        self._stopping = threading.Event()
        self._process: GuardedProcess | None = None
        self._reader: threading.Thread | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            ServiceError: it cannot be started, ends, or is not ready in time.
        """
        logger.info("service {}: starting {}", self.name, shlex.join(redact_argv(self.config.argv)))
        self._launch()
        self._watcher = threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True)
        self._watcher.start()

    def check_ports(self) -> None:
        """Check that its ports are free: a health check would be answered by whoever holds one.

        Raises:
            ServiceError: one is in use; names the process that holds it.
        """
        for port in ports_of(self.config):
            if is_taken(port):
                other = "" if self.name in BUILT_IN_SERVICES else ", or give the service another port"
                raise ServiceError(
                    f"service {self.name}: port {port} is in use by {holder(port)}; end that process{other}"
                )

    def ask_to_stop(self) -> None:
        """Have the process end; do not wait."""
        self._stopping.set()
        if self._process is not None:
            self._process.ask_to_end()

    def stop(self) -> None:
        """End the process and all that it started in its group; does nothing where none runs."""
        self.ask_to_stop()
        if self._watcher is not None:
            self._watcher.join()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None and self._reader is not None:
            self._process.end()
            # Something that left the group may hold the pipe open for ever.
            self._reader.join(_PROBE_SECONDS)

    def _launch(self) -> None:
        self.check_ports()
        began = time.monotonic()
        here = {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))}
        # Without it, what a service in Python prints reaches the log much later.
        env = {**os.environ, **here, "PYTHONUNBUFFERED": "1", **self.config.env}
        try:
            self._process = GuardedProcess(self.config.argv, self._cwd, env, own_tmp=self._own_tmp)
        except ServiceError as error:
            raise ServiceError(f"service {self.name} cannot be started: {error}") from error
        assert self._process.output
        self._reader = self.log.follow(self._process.output)
        try:
            self._await_health(self._process, began)
        except ServiceError as error:
            self._end_process()
            raise ServiceError(f"service {self.name} {error}; {self.log.tail()}") from None
        if not self._stopping.is_set():
            seconds = time.monotonic() - began
            place = f" at {self.config.health.http}" if self.config.health.http else ""
            logger.info("service {}: ready after {:.1f} s{} (process {})", self.name, seconds, place, self._process.pid)

    def _await_health(self, process: GuardedProcess, began: float) -> None:
        while not self._stopping.is_set():
            missing = _what_is_missing(self.config.health, began)
            if process.exit_code is not None:
                hint = "" if process.exit_code else " (its command has to stay in the foreground)"
                raise ServiceError(f"ended with exit code {process.exit_code} before it was ready{hint}")
            if missing is None:
                return
            if time.monotonic() - began > self.config.timeout:
                fixed = self.name in BUILT_IN_SERVICES
                raise ServiceError(
                    f"was not ready within {self.config.timeout:g} s ({missing}); mend it"
                    + ("" if fixed else f", or raise astuner.services.{self.name}.timeout")
                )
            self._stopping.wait(_POLL_SECONDS)

    def _watch(self) -> None:
        restart = self.config.restart
        allowed = float("inf") if restart is True else int(restart)
        restarts, in_a_row, launched = 0, 0, time.monotonic()
        while self._has_ended():
            assert self._process is not None
            ended = f"service {self.name} ended with exit code {self._process.exit_code} before the run did"
            self._end_process()
            if restarts >= allowed:
                logger.error("{} and is not started again (astuner.services.{}.restart); {}", ended, self.name,
                             self.log.tail())  # fmt: skip
                return
            restarts += 1
            logger.warning("{}; starting it again, for the {}. time", ended, restarts)
            in_a_row = 1 if time.monotonic() - launched > _STEADY_SECONDS else in_a_row + 1
            if self._stopping.wait(pause(in_a_row)):
                return
            launched = time.monotonic()
            try:
                self._launch()
            except ServiceError as error:
                logger.error("{}", error)

    def _has_ended(self) -> bool:
        """Wait until the process ends by itself (True), or the service is to stop (False)."""
        assert self._process is not None
        while not self._stopping.wait(_POLL_SECONDS):
            if self._process.exit_code is not None:
                return True
        return False


def pause(starts: int) -> float:
    """Seconds to wait before the n-th new start of a service that does not stay."""
    return _PAUSES[min(starts, len(_PAUSES)) - 1]


def ports_of(config: ServiceConfig) -> list[int]:
    """The ports of this machine that a service opens: those it declares, and that of its health check."""
    ports = list(config.ports)
    if config.health.port is not None:
        ports.append(config.health.port)
    if config.health.http is not None:
        url = urlsplit(config.health.http)
        if url.hostname in _THIS_MACHINE:
            ports.append(url.port or (443 if url.scheme == "https" else 80))
    return list(dict.fromkeys(ports))


def _what_is_missing(health: HealthConfig, began: float) -> str | None:
    """Why a service that began then is not ready, None where it is."""
    if health.http is not None:
        try:
            # A proxy of the environment is not on the way to a service of the run.
            # Nor is its body read, which may be a stream without an end.
            with httpx.stream("GET", health.http, timeout=_PROBE_SECONDS, trust_env=False) as response:
                status = response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{health.http}: {error or type(error).__name__}"
        return None if status < 400 else f"{health.http} answers with status {status}"
    if health.port is not None:
        try:
            socket.create_connection(("127.0.0.1", health.port), timeout=_PROBE_SECONDS).close()
        except OSError as error:
            return f"port {health.port}: {error.strerror or error}"
        return None
    return None if time.monotonic() - began >= _LIFE_SIGN_SECONDS else "it has only just begun"

"""Services of a run: processes that `--with-NAME` starts before the run and stops after it."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from loguru import logger

from astuner.backbone.base import StartedRay
from astuner.config.root import RunConfig
from astuner.config.services import BUILT_IN_SERVICES, HealthConfig, ServiceConfig
from astuner.env_service.addresses import EnvServiceAddress
from astuner.errors import ConfigError, ServiceError
from astuner.launcher.built_in_services import ENV_SERVICE, BuiltInService, automatic_env_service, find_built_in
from astuner.processes.guarded_process import GuardedProcess, ProcessLog, TempDir
from astuner.system.localhost import is_port_taken, port_holder
from astuner.system.redaction.redactor import learn_secrets, redact_argv

_RAY_SERVICES = ("ray", "ray-cluster")
_LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
_POLL_SECONDS = 0.1
_PROBE_SECONDS = 2.0
_MIN_ALIVE_SECONDS = 1.0
_RAY_START_ATTEMPTS = 3
_RAY_TIMEOUT = "timed out during startup"
_RESTART_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
# After this uptime a crash is not related to the start, and the delays begin again with the first.
_STABLE_SECONDS = 300.0


@dataclass(eq=False)
class Service:
    """A process that is started, waited for, watched, restarted if configured, and stopped.

    Attributes:
        name: its name, as in `--with-NAME`.
        temp_dir: folder to create for its temporary files.
        ready_text: what it prints when it is ready, in addition to the health check; "" for nothing.
    """

    name: str
    config: ServiceConfig
    cwd: Path
    temp_dir: TempDir | None = None
    ready_text: str = ""

    def __post_init__(self) -> None:
        self.log = ProcessLog(self.name)
        self._stopping = threading.Event()
        self._process: GuardedProcess | None = None
        self._reader: threading.Thread | None = None
        self._watcher: threading.Thread | None = None

    def check_ports(self) -> None:
        """Raise ServiceError, with its holder, if a port is in use: the health check would reach another process."""
        for port in _ports_of(self.config):
            if is_port_taken(port):
                alternative = "" if self.name in BUILT_IN_SERVICES else ", or give the service another port"
                raise ServiceError(
                    f"service {self.name}: port {port} is in use by {port_holder(port)}; end that process{alternative}"
                )

    def start(self) -> None:
        """Start the process and wait until it is ready; raise ServiceError if it cannot be started or ends."""
        logger.info("service {}: starting {}", self.name, shlex.join(redact_argv(self.config.argv)))
        self._launch()
        self._watcher = threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True)
        self._watcher.start()

    def request_stop(self) -> None:
        """Have the process end, without waiting, so that several services can stop at the same time."""
        self._stopping.set()
        if self._process is not None:
            self._process.request_end()

    def stop(self) -> None:
        """End the process and its group. Does nothing if it is not running."""
        self.request_stop()
        if self._watcher is not None:
            self._watcher.join()
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None and self._reader is not None:
            self._process.end()
            # With a timeout, because a process that left the group may keep the pipe open forever.
            self._reader.join(_PROBE_SECONDS)

    def _launch(self) -> None:
        self.check_ports()
        start = time.monotonic()
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        # Unbuffered, so that the output of Python programs reaches the log immediately.
        env = {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **self.config.env}
        try:
            self._process = GuardedProcess(self.config.argv, self.cwd, env, temp_dir=self.temp_dir)
        except ServiceError as error:
            raise ServiceError(f"service {self.name} cannot be started: {error}") from error
        assert self._process.output
        self._reader = self.log.follow(self._process.output)
        try:
            self._wait_until_ready(self._process, start)
        except ServiceError as error:
            self._end_process()
            raise ServiceError(f"service {self.name} {error}; {self.log.tail()}") from None
        if not self._stopping.is_set():
            seconds = time.monotonic() - start
            address = f" at {self.config.health.http}" if self.config.health.http else ""
            pid = self._process.pid
            logger.info("service {}: ready after {:.1f} s{} (process {})", self.name, seconds, address, pid)

    def _wait_until_ready(self, process: GuardedProcess, start: float) -> None:
        while not self._stopping.is_set():
            reason = _why_not_ready(self.config.health, start)
            if reason is None and not self.log.has(self.ready_text):
                reason = f"it has not printed {self.ready_text!r}"
            if process.exit_code is not None:
                hint = "" if process.exit_code else " (its command must stay in the foreground)"
                raise ServiceError(f"ended with exit code {process.exit_code} before it was ready{hint}")
            if reason is None:
                return
            if time.monotonic() - start > self.config.timeout:
                key = "" if self.name in BUILT_IN_SERVICES else f", or raise astuner.services.{self.name}.timeout"
                raise ServiceError(f"was not ready within {self.config.timeout:g} s ({reason}); fix the service{key}")
            self._stopping.wait(_POLL_SECONDS)

    def _watch(self) -> None:
        """Restart the process when it ends, as often as configured."""
        restart = self.config.restart
        allowed = float("inf") if restart is True else int(restart)
        restarts, consecutive, launched = 0, 0, time.monotonic()
        assert self._process is not None
        while not self._stopping.wait(_POLL_SECONDS):
            if self._process.exit_code is None:
                continue
            event = f"service {self.name} ended with exit code {self._process.exit_code} during the run"
            self._end_process()
            if restarts >= allowed:
                key = f"astuner.services.{self.name}.restart"
                logger.error("{} and is not restarted ({}); {}", event, key, self.log.tail())
                return
            restarts += 1
            logger.warning("{}; restart {}{}", event, restarts, "" if restart is True else f" of {allowed}")
            consecutive = 1 if time.monotonic() - launched > _STABLE_SECONDS else consecutive + 1
            if self._stopping.wait(restart_delay(consecutive)):
                return
            launched = time.monotonic()
            try:
                self._launch()
            except ServiceError as error:
                logger.error("{}", error)


def restart_delay(restart: int) -> float:
    """Return the seconds to wait before the n-th consecutive restart."""
    return _RESTART_DELAYS[min(restart, len(_RESTART_DELAYS)) - 1]


def _ports_of(config: ServiceConfig) -> list[int]:
    """Return the ports of this machine that a service opens: declared ones, and its health check's."""
    ports = list(config.ports)
    if config.health.port is not None:
        ports.append(config.health.port)
    if config.health.http is not None:
        url = urlsplit(config.health.http)
        if url.hostname in _LOCAL_ADDRESSES:
            ports.append(url.port or (443 if url.scheme == "https" else 80))
    return list(dict.fromkeys(ports))


def _why_not_ready(health: HealthConfig, start: float) -> str | None:
    """Return why a service that was started at `start` is not ready, None if it is."""
    if health.http is not None:
        try:
            # Without proxies, which do not lead to this machine. The body is not read: it may be an endless stream.
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
    return None if time.monotonic() - start >= _MIN_ALIVE_SECONDS else "it has just been started"


@dataclass(eq=False)
class Services:
    """The services of one run.

    Attributes:
        services: in the order in which they start.
        ray: the Ray instance that one of the services starts.
        port_locks: are held as long as this object.
        env_service: the address of the environment service that one of them is.
    """

    services: Sequence[Service] = ()
    ray: StartedRay | None = None
    port_locks: Sequence[object] = ()
    env_service: EnvServiceAddress | None = None
    _is_running: bool = field(default=False, init=False)

    @classmethod
    def from_names(cls, names: Sequence[str], config: RunConfig, config_dir: Path, exp_dir: Path) -> Services:
        """Create the services that `--with-NAME` options name.

        Args:
            names: in the order in which they start.
            config_dir: folder of the YAML file, where a relative `cwd` is searched after the working directory.

        Raises:
            ConfigError: a service or its folder does not exist, or two services conflict.
            ServiceError: a built-in service needs a package that is not installed.
        """
        rays = [f"--with-{name}" for name in _RAY_SERVICES if name in names]
        if len(rays) > 1:
            raise ConfigError(f"{' and '.join(rays)} each start a Ray instance; remove one of them")
        if rays and config.astuner.trainer_common.ray_address is not None:
            raise ConfigError(
                f"{rays[0]} starts a Ray instance, but astuner.trainer_common.ray_address names one to join; "
                "remove one of them"
            )
        declared = config.astuner.services
        selected = {
            name: BuiltInService(declared[name]) if name in declared else find_built_in(name, config.astuner, exp_dir)
            for name in names
        }
        for service in declared.values():
            learn_secrets(service.env)
        _check_ports_distinct({name: service.config for name, service in selected.items()})
        services = [
            Service(name, each.config, _find_folder(name, each.config, config_dir), each.temp_dir, each.ready_text)
            for name, each in selected.items()
        ]
        ray = next((service.ray for service in selected.values() if service.ray is not None), None)
        locks = [service.port_lock for service in selected.values()]
        automatic = automatic_env_service(config.astuner, config_dir)
        if automatic is None:
            return cls(services, ray, locks)
        return cls([Service(ENV_SERVICE, automatic[0], Path.cwd()), *services], ray, locks, automatic[1])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the services one after another, each when the previous one is ready; stop them at the end.

        `start_ray` starts that of `--with-ray`. Does nothing if they are already running. ServiceError: a port
        is in use, or a service does not become ready. The services before it are stopped.
        """
        if self._is_running:
            yield
            return
        for service in self.services:
            service.check_ports()
        self._is_running = True
        try:
            for service in self.services:
                if service.name != "ray":
                    _start(service)
            yield
        finally:
            self._stop()

    def start_ray(self) -> None:
        """Start the Ray of `--with-ray`, whose address only the backbone can know; ServiceError: it is not ready."""
        for service in self.services:
            if service.name == "ray":
                _start(service)

    @contextlib.contextmanager
    def recorded_in(self, folder: Path) -> Iterator[None]:
        """Write the logs to `services/` in a run's folder; stop the services at the end, while the record is open."""
        try:
            for service in self.services:
                service.log.open(folder)
            yield
        finally:
            self._stop()
            for service in self.services:
                service.log.close()

    def _stop(self) -> None:
        for service in self.services:
            service.request_stop()
        for service in self.services:
            service.stop()


def _start(service: Service) -> None:
    """Start a service; start Ray again if Ray's own timeout of 30 s expired, as on a busy machine."""
    attempts = _RAY_START_ATTEMPTS if service.name in _RAY_SERVICES else 1
    for attempt in range(1, attempts + 1):
        try:
            return service.start()
        except ServiceError as error:
            if attempt == attempts or _RAY_TIMEOUT not in str(error):
                raise
            logger.warning("service {}: Ray did not start within its 30 s; starting it again", service.name)


def _find_folder(name: str, service: ServiceConfig, config_dir: Path) -> Path:
    if service.cwd is None:
        return Path.cwd()
    for base in (Path.cwd(), config_dir):
        if (base / service.cwd).is_dir():
            return base / service.cwd
    raise ConfigError(
        f"astuner.services.{name}.cwd is {service.cwd!r}, but there is no such folder in {Path.cwd()} or {config_dir}; "
        "correct the path or create the folder"
    )


def _check_ports_distinct(services: Mapping[str, ServiceConfig]) -> None:
    """Check that no two services use one port. The first would answer the second's health check."""
    owners: dict[int, str] = {}
    for name, service in services.items():
        for port in _ports_of(service):
            if owners.setdefault(port, name) != name:
                raise ConfigError(
                    f"--with-{owners[port]} and --with-{name} both use port {port}; change the port of one of them "
                    "(ports or health under astuner.services), or remove one"
                )

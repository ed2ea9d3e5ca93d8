"""The services of a run: what `--with-NAME` starts before it and stops with it."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astuner.backbone.cluster.folder import short_parent
from astuner.backbone.cluster.head import StartedRay, ray_head
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.services import BUILT_IN_SERVICES, HealthConfig, ServiceConfig
from astuner.errors import ConfigError, ServiceError
from astuner.launcher.service import Service, ports_of
from astuner.ports import free_port, is_taken
from astuner.processes.guarded_process import OwnFolder
from astuner.run_record import learn_secrets

_VIEW_PORT = 8765
_RAYS = ("ray", "ray-cluster")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A service that astuner knows how to start.

    Attributes:
        config: as if it had been declared.
        package: what has to be importable, "" for nothing.
        install: how to get that.
        own_tmp: the folder for its temporary files, where it has one of its own.
        ray: what the run computes on, if that is it.
    """

    config: ServiceConfig
    package: str = ""
    install: str = ""
    own_tmp: OwnFolder | None = None
    ray: StartedRay | None = None


def built_in(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltIn:
    """The built-in service `name`, for a run of `config` whose record is in `exp_dir`."""
    if name == "logview":
        exp_dir.mkdir(parents=True, exist_ok=True)  # a first run has no folder yet
        port = free_port() if is_taken(_VIEW_PORT) else _VIEW_PORT  # another run may have its own
        command = [sys.executable, "-m", "astuner", "view", str(exp_dir), "--port", str(port)]
        return BuiltIn(ServiceConfig(command=command, health=HealthConfig(http=f"http://127.0.0.1:{port}/")))
    if name == "appworld":
        serve = ServiceConfig(command="appworld serve environment --port 8000", health=HealthConfig(port=8000))
        install = "`pip install appworld`, then `appworld install` and `appworld download data`"
        return BuiltIn(serve, "appworld", install)
    head = ray_head(config, others_join=name == "ray-cluster")
    service = ServiceConfig(command=head.argv, env=dict(head.env), health=HealthConfig(port=head.port))
    folder = OwnFolder(str(short_parent()), ("TMPDIR", "RAY_TMPDIR"))
    return BuiltIn(service, "ray", '`pip install "ray[default]"`', folder, head.ray)


class Services:
    """The services of one run."""

    def __init__(self, services: Sequence[Service] = (), ray: StartedRay | None = None) -> None:
        """Take services.

        Args:
            services: in the order in which they are started.
            ray: the one among them that the run computes on.
        """
        self._services = services
        self.ray = ray
        self._running = False

    @classmethod
    def named(cls, names: Sequence[str], config: RunConfig, config_dir: Path, exp_dir: Path) -> Services:
        """Find the services that `--with-NAME` asks for.

        Args:
            names: in the order in which they are started.
            config: declares services.
            config_dir: the YAML's folder, in which a relative `cwd` is looked for after the working directory.
            exp_dir: where run records go.

        Raises:
            ConfigError: there is no such service, or its folder does not exist.
            ServiceError: a built-in one needs a package that is not installed.
        """
        _refuse_two_rays(names, config.astuner)
        declared = config.astuner.services
        found = {
            name: BuiltIn(declared[name]) if name in declared else _built_in(name, config.astuner, exp_dir)
            for name in names
        }
        for service in declared.values():
            learn_secrets(service.env)
        _refuse_shared_ports({name: one.config for name, one in found.items()})
        services = [
            Service(name, o.config, _folder(name, o.config, config_dir), o.own_tmp) for name, o in found.items()
        ]
        return cls(services, next((one.ray for one in found.values() if one.ray is not None), None))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start them one after another, each when the one before is ready, and stop them at the end.

        Where they run already, this does nothing.

        Raises:
            ServiceError: one finds its port in use, or does not become ready; those before it are stopped.
        """
        if self._running:
            yield
            return
        for service in self._services:
            service.check_ports()
        self._running = True
        try:
            for service in self._services:
                service.start()
            yield
        finally:
            self._stop()

    @contextlib.contextmanager
    def recorded_in(self, folder: Path) -> Iterator[None]:
        """Write their logs to `services/` of a run's folder, and stop them at the end, while its record is open.

        Raises:
            RecordError: a log cannot be written.
        """
        try:
            for service in self._services:
                service.log.open(folder)
            yield
        finally:
            self._stop()
            for service in self._services:
                service.log.close()

    def _stop(self) -> None:
        for service in self._services:
            service.ask_to_stop()
        for service in self._services:
            service.stop()


def _built_in(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltIn:
    declared = list(config.services)
    if name not in BUILT_IN_SERVICES:
        alike = difflib.get_close_matches(name, (*declared, *BUILT_IN_SERVICES), n=1)
        hint = f"did you mean --with-{alike[0]}? " if alike else ""
        raise ConfigError(
            f"--with-{name}: there is no service {name!r}; {hint}The configuration declares "
            f"{', '.join(declared) or 'none'} (astuner.services), and built in are {', '.join(BUILT_IN_SERVICES)}"
        )
    service = built_in(name, config, exp_dir)
    if service.package and importlib.util.find_spec(service.package) is None:
        raise ServiceError(
            f"--with-{name} needs {service.package}, which is not installed; install it with {service.install}, or "
            "declare a service of another name under astuner.services"
        )
    return service


def _refuse_two_rays(names: Sequence[str], config: AstunerConfig) -> None:
    """Refuse what leaves open on which Ray a run computes.

    Raises:
        ConfigError: names both.
    """
    rays = [f"--with-{name}" for name in _RAYS if name in names]
    if len(rays) > 1:
        raise ConfigError(f"{' and '.join(rays)} each start a Ray; leave one of them out")
    if rays and config.trainer_common.ray_address is not None:
        raise ConfigError(
            f"{rays[0]} starts a Ray, and astuner.trainer_common.ray_address names one to join; leave one of them out"
        )


def _folder(name: str, service: ServiceConfig, config_dir: Path) -> Path:
    """The folder that a service runs in."""
    if service.cwd is None:
        return Path.cwd()
    for base in (Path.cwd(), config_dir):
        if (base / service.cwd).is_dir():
            return base / service.cwd
    raise ConfigError(
        f"astuner.services.{name}.cwd is {service.cwd!r}, and there is no such folder in {Path.cwd()} or {config_dir}; "
        "correct it or make the folder"
    )


def _refuse_shared_ports(services: Mapping[str, ServiceConfig]) -> None:
    """Refuse two services on one port: the health check of the second would be answered by the first.

    Raises:
        ConfigError: names both and the port.
    """
    owners: dict[int, str] = {}
    for name, service in services.items():
        for port in ports_of(service):
            if owners.setdefault(port, name) != name:
                raise ConfigError(
                    f"--with-{owners[port]} and --with-{name} both use port {port}; give one of them another (ports or "
                    "health under astuner.services), or leave one out"
                )

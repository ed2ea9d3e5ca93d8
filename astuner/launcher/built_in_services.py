"""The services that astuner declares itself: the viewer, AppWorld, Ray and a run's environment service."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from astuner.backbone.base import StartedRay
from astuner.config.root import AstunerConfig
from astuner.config.services import BUILT_IN_SERVICES, HealthConfig, ServiceConfig
from astuner.doors import through_door
from astuner.env_service.addresses import AUTO, TOKEN_VARIABLE, EnvServiceAddress
from astuner.errors import ConfigError, ServiceError, did_you_mean
from astuner.processes.guarded_process import TempDir
from astuner.system.localhost import ADDRESS, free_port, is_port_taken
from astuner.system.paths import installed_program, is_installed
from astuner.system.redaction.redactor import learn_secrets

ENV_SERVICE = "env_service"
"""Name of the environment service that a run starts."""
_VIEW_PORT = 8765
_MIN_INSTANCES = 128
_MAX_RESTARTS = 10
# More than the service's own limit for the import of the environments, whose error says more.
_START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class BuiltInService:
    """A service that astuner declares itself.

    Attributes:
        package: package that it requires, "" for none.
        temp_dir: folder to create for its temporary files.
        ready_text: what it prints when it is ready, in addition to the health check; "" for nothing.
        port_lock: keeps other runs from its port, from the port's choice until the service listens. It is released when
            the object is deleted.
    """

    config: ServiceConfig
    package: str = ""
    install: str = ""
    temp_dir: TempDir | None = None
    ray: StartedRay | None = None
    ready_text: str = ""
    port_lock: FileLock | None = None


def find_built_in(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltInService:
    """Return the built-in service `name`; ConfigError: there is none. ServiceError: its package is not installed."""
    declared = list(config.services)
    if name not in BUILT_IN_SERVICES:
        hint = did_you_mean(name, (*declared, *BUILT_IN_SERVICES), "did you mean --with-{}? ", show=str)
        raise ConfigError(
            f"--with-{name}: there is no service {name!r}; {hint}The configuration declares "
            f"{', '.join(declared) or 'none'} (astuner.services); built in are {', '.join(BUILT_IN_SERVICES)}"
        )
    service = built_in_service(name, config, exp_dir)
    if service.package and not is_installed(service.package):
        raise ServiceError(
            f"--with-{name} needs {service.package}, which is not installed; install it with {service.install}, or "
            "declare a service with another name under astuner.services"
        )
    return service


def built_in_service(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltInService:
    """Return a built-in service, whether or not the package that it requires is installed."""
    if name == "logview":
        exp_dir.mkdir(parents=True, exist_ok=True)  # it does not exist before the first run
        lock = FileLock(
            Path(tempfile.gettempdir()) / f"astuner-view-{os.getuid()}.lock", mode=0o600, thread_local=False
        )
        with contextlib.suppress(Timeout):  # another run of this user holds it
            lock.acquire(blocking=False)
        port = _VIEW_PORT if lock.is_locked and not is_port_taken(_VIEW_PORT) else free_port()
        command = [sys.executable, "-m", "astuner", "view", str(exp_dir), "--port", str(port)]
        service = ServiceConfig(command=command, health=HealthConfig(http=f"http://127.0.0.1:{port}/"))
        return BuiltInService(service, port_lock=lock)
    if name == "appworld":
        command = [installed_program("appworld", "appworld") or "appworld", "serve", "environment", "--port", "8000"]
        if root := os.environ.get("APPWORLD_ROOT"):
            command += ["--root", root]
        service = ServiceConfig(command=command, health=HealthConfig(port=8000))
        install = "`astuner install appworld`, then the command `appworld download data` that it prints"
        return BuiltInService(service, "" if shutil.which(command[0]) else "appworld", install)
    service_of_ray: BuiltInService = through_door("ray", "service")(config, others_join=name == "ray-cluster")
    return service_of_ray


def automatic_env_service(config: AstunerConfig, config_dir: Path) -> tuple[ServiceConfig, EnvServiceAddress] | None:
    """Return the service for `task_reader.env_service.env_url: auto`, and its address; None if the run needs none."""
    reader = config.task_reader
    sources = reader.mixture if reader.type == "mixture" else [reader]
    used = [source.env_service for source in sources if source.type == "env_service"]
    environments = dict.fromkeys(each.env_type for each in used if each.env_url == AUTO)
    if not environments:
        return None
    port = free_port()
    limits = [each.limits for each in used if each.env_url == AUTO]
    # An instance may be released after its episode has ended.
    automatic = max(_MIN_INSTANCES, 2 * config.rollout.max_env_worker)
    command = [sys.executable, "-m", "astuner", "env", "serve", f"--port={port}"]
    # The parts of a mixture share the service.
    command += [
        f"--max-instances={max(each.max_instances or automatic for each in limits)}",
        f"--idle-seconds={max(each.idle_seconds for each in limits)}",
        f"--step-timeout={max(each.step_timeout for each in limits)}",
        f"--max-observation-bytes={max(each.max_observation_bytes for each in limits)}",
    ]
    command += [f"--path={config_dir.absolute()}", *(f"--env={each}={each}" for each in environments)]
    address = EnvServiceAddress(f"http://{ADDRESS}:{port}", secrets.token_urlsafe(24))
    variables = {TOKEN_VARIABLE: address.token}
    learn_secrets(variables)
    health = HealthConfig(http=f"{address.url}/health")
    service = ServiceConfig(
        command=command, env=variables, health=health, timeout=_START_SECONDS, restart=_MAX_RESTARTS
    )
    return service, address

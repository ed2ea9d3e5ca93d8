"""The services that astuner declares itself: the viewer, AppWorld and Ray."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from astuner.config.root import AstunerConfig
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.localhost import free_port, is_port_taken
from astuner.processes.guarded_process import TempDir
from astuner.ray_cluster.head import READY_TEXT, StartedRay, ray_head
from astuner.ray_cluster.temp_dir import short_parent

_VIEW_PORT = 8765


@dataclass(frozen=True, slots=True)
class BuiltInService:
    """A service that astuner declares itself.

    Attributes:
        config: the declaration of the service, in the same form as a user's declaration.
        package: package that it requires, "" for none.
        install: command that installs the package.
        temp_dir: folder to create for its temporary files.
        ray: the Ray instance that it starts.
        ready_text: what it prints when it is ready, in addition to the health check; "" for nothing.
    """

    config: ServiceConfig
    package: str = ""
    install: str = ""
    temp_dir: TempDir | None = None
    ray: StartedRay | None = None
    ready_text: str = ""


def built_in_service(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltInService:
    """Return the built-in service `name` for a run with its record in `exp_dir`."""
    if name == "logview":
        exp_dir.mkdir(parents=True, exist_ok=True)  # it does not exist before the first run
        port = free_port() if is_port_taken(_VIEW_PORT) else _VIEW_PORT  # another run may have a viewer
        command = [sys.executable, "-m", "astuner", "view", str(exp_dir), "--port", str(port)]
        return BuiltInService(ServiceConfig(command=command, health=HealthConfig(http=f"http://127.0.0.1:{port}/")))
    if name == "appworld":
        service = ServiceConfig(command="appworld serve environment --port 8000", health=HealthConfig(port=8000))
        install = "`pip install appworld`, then `appworld install` and `appworld download data`"
        return BuiltInService(service, "appworld", install)
    head = ray_head(config, others_join=name == "ray-cluster")
    service = ServiceConfig(command=head.argv, env=dict(head.env), health=HealthConfig(port=head.port))
    temp_dir = TempDir(str(short_parent()), ("TMPDIR", "RAY_TMPDIR"))
    return BuiltInService(service, "ray", '`pip install "ray[default]"`', temp_dir, head.ray, READY_TEXT)

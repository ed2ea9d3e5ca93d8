"""The services that astuner declares itself: the viewer, AppWorld and Ray."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from astuner.backbone.ray_cluster.started import StartedRay
from astuner.config.root import AstunerConfig
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.doors import through_door
from astuner.processes.guarded_process import TempDir
from astuner.system.environments_folder import installed_program
from astuner.system.localhost import free_port, is_port_taken

_VIEW_PORT = 8765


class ViewerPortLock:
    """A lock of a file that keeps other runs from a port, from its choice until the service listens.

    The lock is released when the object is deleted.
    """

    def __init__(self, path: Path) -> None:
        """Acquire the lock.

        Raises:
            BlockingIOError: another object holds it.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __del__(self) -> None:
        os.close(self._fd)


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
        port_lock: keeps other runs from its port while the object exists.
    """

    config: ServiceConfig
    package: str = ""
    install: str = ""
    temp_dir: TempDir | None = None
    ray: StartedRay | None = None
    ready_text: str = ""
    port_lock: ViewerPortLock | None = None


def built_in_service(name: str, config: AstunerConfig, exp_dir: Path) -> BuiltInService:
    """Return the built-in service `name` for a run with its record in `exp_dir`."""
    if name == "logview":
        exp_dir.mkdir(parents=True, exist_ok=True)  # it does not exist before the first run
        lock = _lock_view_port()
        port = free_port() if lock is None or is_port_taken(_VIEW_PORT) else _VIEW_PORT
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


def _lock_view_port() -> ViewerPortLock | None:
    """Return a lock on the viewer's usual port; None if another run of this user holds it."""
    with contextlib.suppress(BlockingIOError):
        return ViewerPortLock(Path(tempfile.gettempdir()) / f"astuner-view-{os.getuid()}.lock")
    return None

"""The environment service that a run starts for `task_reader.env_service.env_url: auto`."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from astuner.config.root import AstunerConfig
from astuner.config.services import HealthConfig, ServiceConfig
from astuner.env_service.addresses import AUTO, TOKEN_VARIABLE, EnvServiceAddress
from astuner.system.localhost import ADDRESS, free_port
from astuner.system.redaction import learn_secrets

SERVICE_NAME = "env_service"
_MIN_INSTANCES = 128
_MAX_RESTARTS = 10
# More than the service's own limit for the import of the environments, whose error says more.
_START_SECONDS = 180.0


def automatic_env_service(config: AstunerConfig, config_dir: Path) -> tuple[ServiceConfig, EnvServiceAddress] | None:
    """Return the environment service of a run, and its address; None if the run needs none."""
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

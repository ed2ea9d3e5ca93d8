"""Whether a service's ports are free."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from astuner.config.services import ServiceConfig
from astuner.errors import ServiceError
from astuner.loopback import holder

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def check_ports(name: str, config: ServiceConfig) -> None:
    """Check that the ports of service `name` are free: a health check would be answered by whoever holds one.

    Raises:
        ServiceError: one is in use; names the process that holds it.
    """
    for port in _ports_of(config):
        if _is_taken(port):
            raise ServiceError(
                f"service {name}: port {port} is in use by {holder(port)}; end that process, or give the service "
                f"another port"
            )


def _ports_of(config: ServiceConfig) -> list[int]:
    ports = list(config.ports)
    if config.health.port is not None:
        ports.append(config.health.port)
    if config.health.http is not None:
        url = urlsplit(config.health.http)
        if url.hostname in _THIS_MACHINE:
            ports.append(url.port or (443 if url.scheme == "https" else 80))
    return list(dict.fromkeys(ports))


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # What an earlier process left in TIME_WAIT keeps nobody from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False

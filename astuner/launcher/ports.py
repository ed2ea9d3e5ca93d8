"""Whether a port is free, and who holds it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

import psutil

from astuner.config.services import ServiceConfig
from astuner.errors import ServiceError

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def check_ports(name: str, config: ServiceConfig) -> None:
    """Check that the ports of service `name` are free: a health check would be answered by whoever holds one.

    Raises:
        ServiceError: one is in use; names the process that holds it.
    """
    for port in _ports_of(config):
        holder = holder_of(port)
        if holder is not None:
            raise ServiceError(
                f"service {name}: port {port} is in use by {holder}; end that process, or give the service another port"
            )


def holder_of(port: int) -> str | None:
    """Say who holds a port of this machine, None if it is free."""
    return _holder(port) if _is_taken(port) else None


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


def _holder(port: int) -> str:
    """The process in words: its number and name, without its arguments, which may hold secrets."""
    try:
        found = [entry for entry in psutil.net_connections("inet") if entry.laddr and entry.laddr.port == port]
        pids = [entry.pid for entry in found if entry.pid is not None]
        if pids:
            return f"process {pids[0]} ({psutil.Process(pids[0]).name()})"
    except psutil.Error:  # systems on which only root may ask, and a process that has just ended
        pass
    return "a process that this user may not see"

"""Servers on 127.0.0.1: their ports, and the check that a request comes from this machine's user."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterable, Mapping, MutableMapping

import psutil

from astuner.errors import ServiceError

ADDRESS = "127.0.0.1"
BACKLOG = 2048
"""Connections that a server's socket holds until the server accepts them."""


def listen(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1, 0 for a free one. ServiceError names its holder."""
    try:
        return listening_socket(ADDRESS, port)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = f"is in use by {port_holder(port)}" if in_use else f"cannot be used ({error.strerror})"
        raise ServiceError(f"port {port} {reason}; give another port with --port, or 0 for any free port") from error


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of an address, 0 for a free one; OSError: it cannot be used."""
    # asyncio switches Nagle's algorithm off, which delays answers by 40 ms, if the protocol is set.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens at the moment."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def is_port_taken(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        # A connection of an earlier process in TIME_WAIT does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def port_holder(port: int) -> str:
    """Return the id and name of the process that uses a port.

    The process's command line is omitted, because it may contain secrets.
    """
    try:
        connections = [each for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port]
        connections.sort(key=lambda each: each.status != psutil.CONN_LISTEN)
        pids = [each.pid for each in connections if each.pid is not None]
        if pids:
            return f"process {pids[0]} ({psutil.Process(pids[0]).name()})"
    except psutil.Error:  # Some systems allow this query to root only, and the process may have ended.
        pass
    return "a process that this user may not see"


def local_hosts(port: int) -> list[str]:
    """Return the `Host` headers with which local clients address a server on this port."""
    names = [ADDRESS, "localhost"]
    # Browsers leave out the default port of http.
    return [f"{name}:{port}" for name in names] + (names if port == 80 else [])


def rejection_reason(headers: Mapping[str, str], hosts: Collection[str]) -> str | None:
    """Return why a request must be rejected, or None if it was sent to this server by this machine's user.

    An unknown `Host` indicates DNS rebinding; a foreign `Origin` indicates a request from another site.

    Args:
        headers: Headers of the request, by lower-case name.
        hosts: Accepted values of `Host`.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if host not in hosts:
        return "This server accepts requests to its own address only."
    if origin is not None and origin != f"http://{host}":
        return "This server does not accept requests from other sites."
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
        return "This server does not accept requests from other sites."
    return None


def bypass_proxies(environment: MutableMapping[str, str], hosts: Iterable[str] = ()) -> None:
    """Exclude this machine and `hosts` from the proxies in an environment, which cannot reach a service on loopback.

    Clients read the exceptions from `no_proxy`, or from `NO_PROXY`, or from both.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        given = environment.get(name) or environment.get(other) or ""
        entries = dict.fromkeys((*filter(None, map(str.strip, given.split(","))), "127.0.0.1", "localhost", *hosts))
        environment[name] = ",".join(entries)

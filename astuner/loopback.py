"""What a server that is for this machine alone needs: a port of 127.0.0.1, and who may ask it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Mapping

from astuner.errors import ServiceError
from astuner.ports import holder

ADDRESS = "127.0.0.1"


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; 0 takes a free one.

    Raises:
        ServiceError: the port cannot be had; names the process that holds it.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = f"is in use by {holder(port)}" if taken else f"cannot be used ({error.strerror})"
        raise ServiceError(f"port {port} {why}; give another one with --port, or 0 for any that is free") from error
    return listener


def own_hosts(port: int) -> list[str]:
    """Return the values of `Host` under which a server on this port is asked for locally."""
    names = [ADDRESS, "localhost"]
    # Browsers leave out the port that http has by default.
    return [f"{name}:{port}" for name in names] + (names if port == 80 else [])


def why_foreign(headers: Mapping[str, str], hosts: Collection[str]) -> str | None:
    """Return why a request was not made to this server by this machine's user, or None.

    A foreign `Host` is what DNS rebinding looks like, a foreign `Origin` another site that asks from the browser.

    Args:
        headers: of the request, by lower-case name.
        hosts: the values of `Host` that are answered.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if host not in hosts:
        return "This server answers to its own address only."
    if origin is not None and origin != f"http://{host}":
        return "Another site may not ask this server."
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
        return "Another site may not ask this server."
    return None

"""Whether a port is free, and who holds it."""

from __future__ import annotations

import errno
import socket

import psutil


def is_taken(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        # What an earlier process left in TIME_WAIT keeps nobody from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holder(port: int) -> str:
    """The process in words: its number and name, without its arguments, which may hold secrets."""
    try:
        found = [entry for entry in psutil.net_connections("tcp") if entry.laddr and entry.laddr.port == port]
        found.sort(key=lambda entry: entry.status != psutil.CONN_LISTEN)
        pids = [entry.pid for entry in found if entry.pid is not None]
        if pids:
            return f"process {pids[0]} ({psutil.Process(pids[0]).name()})"
    except psutil.Error:  # systems on which only root may ask, and a process that has just ended
        pass
    return "a process that this user may not see"

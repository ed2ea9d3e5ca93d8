"""Serves the page on this machine until it is interrupted."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from astuner.errors import RecordError
from astuner.viewer.app import create_app
from astuner.viewer.guard import own_hosts
from astuner.viewer.indexes import Indexes
from astuner.viewer.runs import Runs

ADDRESS = "127.0.0.1"


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Show the runs of `folder` on 127.0.0.1 until Ctrl-C.

    Args:
        folder: a run's, or one that holds runs.
        port: the port; 0 takes a free one.
        ready: told the page's address once it can be asked.

    Raises:
        RecordError: there is no such folder, or the port is taken.
    """
    indexes = Indexes(Runs(folder))
    with listening(port) as listener:
        taken = listener.getsockname()[1]
        app = create_app(indexes, own_hosts(taken))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
        ready(f"http://{ADDRESS}:{taken}/")
        try:
            server.run([listener])
        finally:
            indexes.close()


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; 0 takes a free one.

    Raises:
        RecordError: the port cannot be had.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise RecordError(f"port {port} {why}; give another one with --port, or 0 for any that is free") from error
    return listener

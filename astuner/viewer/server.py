"""Serves the page on this machine until it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import uvicorn

from astuner.loopback import ADDRESS, listening, own_hosts
from astuner.viewer.app import create_app
from astuner.viewer.indexes import Indexes
from astuner.viewer.runs import Runs


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Show the runs of `folder` on 127.0.0.1 until Ctrl-C.

    Args:
        folder: a run's, or one that holds runs.
        port: the port; 0 takes a free one.
        ready: told the page's address once it can be asked.

    Raises:
        RecordError: there is no such folder.
        ServiceError: the port is taken.
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

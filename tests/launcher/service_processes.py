"""A service to declare, and what its processes leave."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launcher.liveness import lives

Declare = Callable[..., None]


def served(port: int, note: str = "note", path: str = "/health", **more: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}{path}"
    return {"command": f"python a_service.py {port} {note}", "health": {"http": url}, "timeout": 30, **more}


def processes(note: str = "note") -> list[int]:
    """The processes that a service has noted."""
    return [int(pid) for pid in Path(note).read_text().split()]


def assert_gone(port: int, note: str = "note") -> None:
    assert len(processes(note)) == 2
    assert not [pid for pid in processes(note) if lives(pid)]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0

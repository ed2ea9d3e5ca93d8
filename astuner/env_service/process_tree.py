"""Ends the processes of environments."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path


def end_host(pid: int) -> None:
    """Kill a host and the processes that its environment has started."""
    others = [child for child in descendants(pid) if _group(child) != pid]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    kill_all(others)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes, as far as they exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Return the processes below a host, as far as Linux lists them. MCP servers have a group of their own."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from descendants(child)


def _group(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None

"""Ends the processes of environments."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from astuner.system.process_tree import child_pids


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
    """Return the processes below a host. MCP servers have a group of their own."""
    for child in child_pids(pid):
        yield child
        yield from descendants(child)


def _group(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None

"""Limits that the worker processes of a run share: concurrent requests to an LLM, and its tokens and cost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

_POLL_SECONDS = 0.02

_folder: Path | None = None


def share_limits(folder: Path | None) -> None:
    """Share this process's limits with the other processes that name the same folder; None for no other process."""
    global _folder  # noqa: PLW0603 it belongs to the whole process
    _folder = folder


@contextlib.asynccontextmanager
async def shared_slot(count: int) -> AsyncIterator[None]:
    """Hold one of `count` slots during the block, and wait for one before it. A process that ends frees its slots."""
    if _folder is None:
        yield
        return
    while (held := _free_slot(_folder, count)) is None:
        await asyncio.sleep(random.uniform(_POLL_SECONDS, 2 * _POLL_SECONDS))
    try:
        yield
    finally:
        os.close(held)


def _free_slot(folder: Path, count: int) -> int | None:
    """Lock a file of a slot, and return its descriptor; None if all are locked."""
    for number in range(count):
        descriptor = os.open(folder / f"slot-{number}", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return descriptor
    return None


def shared_use(tokens: int = 0, cost: float = 0.0) -> tuple[int, float] | None:
    """Add tokens and their cost to the sums of all processes, and return the sums; None if no other process shares."""
    if _folder is None:
        return None
    with _locked(_folder / "use") as descriptor:
        content = os.pread(descriptor, 1024, 0)
        earlier = json.loads(content) if content else [0, 0.0]
        sums = (int(earlier[0]) + tokens, float(earlier[1]) + cost)
        if tokens or cost:
            text = json.dumps(sums).encode()
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
    return sums


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)

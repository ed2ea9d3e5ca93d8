"""A deadline that says where things stood when it passed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

from loguru import logger

from astuner.stacks import shown, task_stack


@contextlib.asynccontextmanager
async def deadline(seconds: float | None, overdue: Callable[[], str]) -> AsyncIterator[asyncio.Timeout]:
    """Be `asyncio.timeout`, and leave the stack of the task in the log before the task is cancelled.

    Args:
        seconds: what the block may take; None for as long as it wants.
        overdue: what to say above the stack.
    """
    task, thread = asyncio.current_task(), threading.current_thread()
    assert task is not None

    def say() -> None:
        logger.debug("{}; it stood at\n{}", overdue(), shown(task_stack(task, thread)))

    # Due a moment before the timeout, so that nothing has been unwound yet.
    told = None if seconds is None else asyncio.get_running_loop().call_later(seconds, say)
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield timeout
    finally:
        if told is not None:
            told.cancel()

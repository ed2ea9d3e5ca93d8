"""Nothing that an episode started outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from loguru import logger

T = TypeVar("T")

_PATIENCE_SECONDS = 0.1


async def without_leftovers(episode: Coroutine[object, object, T]) -> T:
    """Await an episode, and end the tasks that it left on the loop, as `asyncio.run` would.

    The loop goes on to the next episode: what is left would run beside that one, or, where nothing but itself refers to
    it, be destroyed while it waits, which asyncio complains of. A task that ignores its end for 0.1 s is left behind.
    """
    try:
        return await episode
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            _, stubborn = await asyncio.wait(left, timeout=_PATIENCE_SECONDS)
            logger.debug("ended {} tasks that an episode had left; {} go on", len(left), len(stubborn))

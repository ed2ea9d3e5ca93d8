"""An event loop in a thread of its own, for clients and pools that any thread and any loop may use."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return a coroutine's result. This thread waits, even if it runs an event loop, as a notebook's thread does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # A second loop cannot run in this thread.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(contextvars.copy_context().run, asyncio.run, coroutine).result()


class LoopThread:
    """A running event loop in a daemon thread, which does not belong to the episode that starts it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        contextvars.Context().run(self._thread.start)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self, seconds: float | None = None) -> None:
        """Cancel what runs, and end the loop; wait for the thread, at most some seconds."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

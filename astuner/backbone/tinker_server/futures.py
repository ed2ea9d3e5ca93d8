"""Results that clients come back for."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from loguru import logger

from astuner.backbone.tinker_server.refusal import Refusal
from astuner.errors import AstunerError

Work = Callable[[], Awaitable[dict[str, Any]]]

KEPT_SECONDS = 1800.0
"""How long a result waits for its client."""
KEPT_AFTER_RETRIEVAL_SECONDS = 60.0
"""How long it stays after it was sent: the answer may have been lost on its way."""
MOST_PENDING = 4096
"""Requests at once; clients hold back sampling when they are told of it (429)."""


@dataclass
class _Future:
    session_id: str
    task: asyncio.Task[bytes]
    ends: float | None = None
    """When it is forgotten; None while it is computed."""


class Futures:
    """Results by request id. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._futures: dict[str, _Future] = {}
        # Ids of another server's life are told from those that were dropped.
        self._life, self._count = secrets.token_hex(4), 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._futures)

    def check_room(self) -> None:
        """Check that one more may begin.

        Raises:
            Refusal: too many are being computed.
        """
        if sum(future.ends is None for future in self._futures.values()) >= MOST_PENDING:
            raise Refusal(f"{MOST_PENDING} requests are being computed; wait for some of them", 429)

    def start(self, session_id: str, work: Work) -> str:
        """Begin `work`, whose result is the wire's; return the id under which it can be asked for.

        Raises:
            Refusal: the server is ending.
        """
        if self._closed:
            raise Refusal("the server is ending", 503)
        self._count += 1
        request_id = f"{self._life}-{self._count}"
        future = _Future(session_id, asyncio.create_task(_settled(work)))
        self._futures[request_id] = future
        future.task.add_done_callback(lambda _task: self._finish(future))
        return request_id

    def _finish(self, future: _Future) -> None:
        if future.ends is None:
            future.ends = self._clock() + KEPT_SECONDS

    async def retrieve(self, request_id: str, wait: float) -> bytes | None:
        """Return a result as JSON, or None where it is not there after `wait` seconds.

        Raises:
            Refusal: there is no such request (any more).
        """
        future = self._futures.get(request_id)
        if future is None and not request_id.startswith(f"{self._life}-"):
            raise Refusal(f"request {request_id!r} is not of this server, which may have been restarted", 404)
        if future is not None:
            await asyncio.wait([future.task], timeout=wait)
        if future is None or future.task.cancelled():
            raise Refusal(f"the result of {request_id} is gone: its session ended, or nobody came for it", 410)
        if not future.task.done():
            return None
        soon = self._clock() + KEPT_AFTER_RETRIEVAL_SECONDS
        future.ends = soon if future.ends is None else min(future.ends, soon)
        return future.task.result()

    def sweep(self) -> None:
        """Forget what nobody will come for any more."""
        now = self._clock()
        for request_id in [key for key, future in self._futures.items() if future.ends and future.ends <= now]:
            del self._futures[request_id]

    def drop(self, session_id: str) -> None:
        """End and forget the requests of a session."""
        for request_id, future in list(self._futures.items()):
            if future.session_id == session_id:
                future.task.cancel()
                del self._futures[request_id]

    def close(self) -> None:
        """End and forget all requests, and begin no more."""
        self._closed = True
        for session_id in {future.session_id for future in self._futures.values()}:
            self.drop(session_id)


async def _settled(work: Work) -> bytes:
    """Return the result or the error as the wire has it; the client raises the latter."""
    try:
        answer = json.dumps(await work(), allow_nan=False)
    except AstunerError as error:
        answer = json.dumps({"error": str(error), "category": "user"})
    # Whatever goes wrong in a request is the answer to it; the server goes on.
    except Exception as error:
        logger.opt(exception=error).error("a request failed: {}", error)
        answer = json.dumps({"error": f"{type(error).__name__}: {error}", "category": "server"})
    return answer.encode()

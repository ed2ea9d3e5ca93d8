"""Checks of every request before it is routed: its sender and its size."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.system.localhost import rejection_reason
from astuner.tinker_server.errors import TinkerRequestError

_CONCURRENT_BODIES = 4


def error_response(message: str, status: int) -> Response:
    """Return a response that the client raises as an error."""
    return JSONResponse({"detail": message, "error": message, "category": "user"}, status)


class LocalClientsOnly:
    """Middleware that rejects requests of web pages and requests with a foreign `Host` (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or reject it."""
        if scope["type"] == "http":
            reason = rejection_reason(Request(scope).headers, self._hosts)
            if reason is not None:
                await error_response(reason, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class AnswersWhenCancelled:
    """Middleware that answers a request that is cancelled because it outlasts the server's shutdown.

    uvicorn would log it as a crash of the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        has_answer = False

        async def tracked(message: Message) -> None:
            nonlocal has_answer
            has_answer = True
            await send(message)

        try:
            await self._app(scope, receive, tracked)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_answer:
                await error_response("the server is shutting down", 503)(scope, receive, send)


class LimitedBodies:
    """Middleware that limits the size of each request body, and the total size that is read concurrently.

    A body that is too large according to its `Content-Length` is rejected without being read. A body without this
    header is rejected as soon as it exceeds the limit.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        """Wrap an application.

        Args:
            app: the application.
            limit: maximum size of a body, in bytes. Concurrent bodies have at most four times this size in total.
        """
        self._app, self._limit = app, limit
        self._in_memory = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a limited body, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Request(scope).headers.get("content-length", "")
        error = self._rejection(int(declared)) if declared.isdecimal() and len(declared) < 20 else None
        if error is not None:
            response = error_response(str(error), error.status)
            # The connection is closed, because the rest of the body would still arrive.
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            piece = len(message.get("body", b""))
            error = self._rejection(size + piece, piece)
            if error is not None:
                raise error
            size += piece
            self._in_memory += piece
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._in_memory -= size

    def _rejection(self, size: int, more: int = 0) -> TinkerRequestError | None:
        """Return the error for a body with `size` bytes, `more` of them new; None if the body is accepted."""
        if size > self._limit:
            return TinkerRequestError(
                f"the request has {size / 2**20:,.1f} MiB{' or more' if more else ''}; the limit of this server is "
                f"{self._limit // 2**20:,} MiB; send fewer or shorter sequences in one request, or start the server "
                f"with --max-body {math.ceil(size / 2**20)} or more",
                413,
            )
        if self._in_memory + (more or size) > _CONCURRENT_BODIES * self._limit:
            return TinkerRequestError("the server is reading too many large requests concurrently; try again", 503)
        return None

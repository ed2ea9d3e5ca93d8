"""The HTTP server: the checks of every request before it is routed, and the process's lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from loguru import logger
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.backbone.training.run_inputs import model_path
from astuner.errors import AstunerError, field_problems
from astuner.system.localhost import ADDRESS, listen, local_hosts, rejection_reason
from astuner.tinker_server.routes import add_routes
from astuner.tinker_server.service import Limits, TinkerService
from astuner.tinker_server.trainable_model import BaseLanguageModel
from astuner.tinker_server.wire import TinkerRequestError

_SWEEP_SECONDS = 10.0
_SHUTDOWN_SECONDS = 3
_MAX_HEADER_BYTES = 65536
_CONCURRENT_BODIES = 4


class _Server(uvicorn.Server):
    """Cancels pending futures on shutdown, so that requests that wait for them end."""

    def __init__(self, config: uvicorn.Config, service: TinkerService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down."""
        self._service.futures.close()
        await super().shutdown(sockets)


def serve(
    model: str,
    checkpoints: Path,
    on_ready: Callable[[str, tuple[str, ...]], None],
    *,
    port: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    limits: Limits,
) -> None:
    """Serve a model on 127.0.0.1 until SIGINT or SIGTERM.

    Args:
        model, dtype: as `model.path` and `model.dtype` of the configuration.
        checkpoints: their folder.
        on_ready: called with the server's address and its model's names before the server accepts requests.
        port: 0 selects a free port.
        device: auto, cpu or cuda.

    Raises:
        ServiceError: the port is in use.
        ModelError: the model does not exist.
        PluginError: `package.module->function` cannot be imported.
        BackboneError: the device does not exist.
    """
    with listen(port) as listener:
        port = listener.getsockname()[1]
        folder = model_path(model, "--model", (Path.cwd(),))
        path = Path(folder).expanduser()
        # Clients load the tokenizer from the first name.
        names = (str(path.resolve()) if path.is_dir() else folder, folder, model)
        base_model = BaseLanguageModel(folder, tuple(dict.fromkeys(names)), device, dtype)
        service = TinkerService(base_model, checkpoints, limits)
        config = uvicorn.Config(
            create_app(service, local_hosts(port)),
            log_level="warning",
            access_log=False,
            server_header=False,
            http="h11",
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        on_ready(f"http://{ADDRESS}:{port}", base_model.names)
        _Server(config, service).run([listener])


def create_app(service: TinkerService, hosts: Collection[str]) -> FastAPI:
    """Return the ASGI application for the accepted values `hosts` of the `Host` header; it closes `service`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(_SWEEP_SECONDS)
                try:
                    service.sweep()
                except (AstunerError, OSError, ValueError, KeyError) as error:  # e.g. a corrupt checkpoint
                    logger.warning("expired sessions and checkpoints could not be removed: {}", error)

        sweeper = asyncio.create_task(sweep())
        yield
        sweeper.cancel()
        await service.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(LimitedBodies, limit=service.limits.body_bytes)
    app.add_middleware(LocalClientsOnly, hosts=hosts)
    app.add_middleware(AnswersWhenCancelled)

    @app.exception_handler(TinkerRequestError)
    def request_error(_request: Request, error: TinkerRequestError) -> Response:
        response = error_response(str(error), error.status)
        if error.status == 413:
            response.headers["Connection"] = "close"  # the rest of the body would still arrive
        return response

    @app.exception_handler(ValidationError)
    def validation_error(_request: Request, error: ValidationError) -> Response:
        problems = field_problems(error, "body")
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return error_response(f"the request is not a valid tinker request: {'; '.join(problems[:3])}{more}", 422)

    @app.exception_handler(StarletteHTTPException)
    def unknown_route(request: Request, error: StarletteHTTPException) -> Response:
        message = (
            f"this server has no {request.method} {request.url.path}; docs/en/serve_tinker.md lists what it supports"
        )
        return error_response(message, error.status_code)

    add_routes(app, service)
    return app


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
        """Limit bodies to `limit` bytes each, and concurrent bodies to four times this size in total."""
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

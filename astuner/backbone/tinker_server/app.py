"""The server's addresses: those of tinker 0.20 that have to do with training, sampling and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from loguru import logger
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from astuner.backbone.tinker_server import wire
from astuner.backbone.tinker_server.catalogue import add_catalogue
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.service import TinkerService
from astuner.errors import AstunerError
from astuner.loopback import why_foreign

API = "/api/v1"
_POLL_SECONDS = 20.0
"""How long a request for a result waits for it; the client gives up on an answer after 45 s."""
_SWEEP_SECONDS = 10.0
_Wire = TypeVar("_Wire", bound=wire.Wire)


class _OwnOnly:
    """Refuses what does not come from this machine's own programs: other sites in a browser, rebound names."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            reason = why_foreign(Request(scope).headers, self._hosts)
            if reason is not None:
                await _refused(reason, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(service: TinkerService, hosts: Collection[str]) -> FastAPI:
    """Return the server's application.

    Args:
        service: does the work; closed when the application ends.
        hosts: the values of `Host` that are answered.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(service))
        yield
        sweeping.cancel()
        await service.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(_OwnOnly, hosts=hosts)

    @app.exception_handler(Refusal)
    def refused(_request: Request, refusal: Refusal) -> Response:
        return _refused(str(refusal), refusal.status)

    @app.exception_handler(ValidationError)
    def invalid(_request: Request, error: ValidationError) -> Response:
        found = [f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors(include_url=False)]
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        return _refused(f"the request is not as tinker 0.20 sends it: {'; '.join(found[:3])}{more}", 422)

    @app.exception_handler(StarletteHTTPException)
    def unknown(request: Request, error: StarletteHTTPException) -> Response:
        about = f"this server has no {request.method} {request.url.path}; what it has is in docs/en/serve_tinker.md"
        return _refused(about, error.status_code)

    _add_clients(app, service)
    _add_work(app, service)
    _add_futures(app, service)
    add_catalogue(app, service)
    return app


async def _sweep(service: TinkerService) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            service.sweep()
        except (AstunerError, OSError, ValueError, KeyError) as error:  # a checkpoint that somebody else spoilt
            logger.warning("what has expired could not be looked for: {}", error)


def _refused(message: str, status: int) -> Response:
    return JSONResponse({"detail": message, "error": message, "category": "user"}, status)


def _add_clients(app: FastAPI, service: TinkerService) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def client_config() -> dict[str, Any]:
        # Chunks of a pass come in order then, and gradients do not depend on chance.
        return {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_write_fwdbwd": False}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        length = service.start.max_length
        return {"supported_models": [{"model_name": x, "max_context_length": length} for x in service.start.names]}

    @app.post(f"{API}/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}  # and not kept

    @app.post(f"{API}/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        wire.CreateSessionRequest.model_validate_json(await request.body())
        return {"type": "create_session", "session_id": service.sessions.begin().session_id}

    @app.post(f"{API}/session_heartbeat")
    async def session_heartbeat(request: Request) -> dict[str, Any]:
        asked = wire.SessionRequest.model_validate_json(await request.body())
        service.sessions.heard_of(asked.session_id)
        return {"type": "session_heartbeat"}


def _add_work(app: FastAPI, service: TinkerService) -> None:
    def add(name: str, kind: type[_Wire], answer: Callable[[_Wire], dict[str, Any]]) -> None:
        async def served(request: Request) -> dict[str, Any]:
            return answer(kind.model_validate_json(await request.body()))

        app.post(f"{API}/{name}", name=name)(served)

    add("create_model", wire.CreateModelRequest, service.create_model)
    add("forward", wire.ForwardRequest, service.forward)
    add("forward_backward", wire.ForwardBackwardRequest, service.forward_backward)
    add("optim_step", wire.OptimStepRequest, service.optim_step)
    add("save_weights", wire.SaveWeightsRequest, service.save_weights)
    add("save_weights_for_sampler", wire.SaveWeightsForSamplerRequest, service.save_weights_for_sampler)
    add("load_weights", wire.LoadWeightsRequest, service.load_weights)
    add("unload_model", wire.ModelIdRequest, lambda asked: service.unload_model(asked.model_id))
    add("create_sampling_session", wire.CreateSamplingSessionRequest, service.create_sampling_session)
    add("asample", wire.SampleRequest, service.sample)


def _add_futures(app: FastAPI, service: TinkerService) -> None:
    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        asked = wire.RetrieveRequest.model_validate_json(await request.body())
        result = await service.futures.retrieve(asked.request_id, _POLL_SECONDS)
        if result is None:
            pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return Response(json.dumps(pending), 408, media_type="application/json")
        return Response(result, media_type="application/json")

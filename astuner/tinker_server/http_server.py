"""The HTTP server: routes for training and sampling, request checks, and the process's lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from loguru import logger
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from astuner.backbone.training.model_folder import model_path
from astuner.backbone.training.tinker_policy import POLICY_EXTENSION, POLICY_HEADER, TinkerPolicy
from astuner.errors import AstunerError
from astuner.system.localhost import ADDRESS, listen, local_hosts
from astuner.tinker_server import protobuf, wire
from astuner.tinker_server.base_model import BaseLanguageModel
from astuner.tinker_server.errors import TinkerRequestError
from astuner.tinker_server.middleware import AnswersWhenCancelled, LimitedBodies, LocalClientsOnly, error_response
from astuner.tinker_server.rest_routes import API, add_rest_routes
from astuner.tinker_server.service import Limits, TinkerService
from astuner.tinker_server.sessions import Result, server_error

_POLL_SECONDS = 20.0
"""Seconds for which a request waits for a result. The client times out after 45 s."""
_SWEEP_SECONDS = 10.0
_SHUTDOWN_SECONDS = 3
_MAX_HEADER_BYTES = 65536
_MAX_CHUNK_BYTES = 5_000_000
"""Size above which the client splits the data of a pass; its own default."""
_WireModel = TypeVar("_WireModel", bound=wire.WireModel)


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    Attributes:
        model: the model, as `model.path` of the configuration.
        port: the port; 0 selects a free one.
        device: auto, cpu or cuda.
        dtype: as `model.dtype`.
        folder: the checkpoint folder.
        limits: limits on models, engines and checkpoints.
    """

    model: str
    port: int = 0
    device: str = "auto"
    dtype: str = "auto"
    folder: Path = Path("launcher_record/tinker")
    limits: Limits = field(default_factory=Limits)


class _Server(uvicorn.Server):
    """Cancels pending futures on shutdown, so that requests that wait for them end."""

    def __init__(self, config: uvicorn.Config, service: TinkerService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down."""
        self._service.futures.close()
        await super().shutdown(sockets)


def serve(options: ServerOptions, on_ready: Callable[[str, tuple[str, ...]], None]) -> None:
    """Serve a model on 127.0.0.1 until SIGINT or SIGTERM.

    Args:
        options: the options.
        on_ready: called with the server's address and the names of its model before it accepts requests.

    Raises:
        ServiceError: the port is in use.
        ModelError: the model does not exist.
        PluginError: `package.module->function` cannot be imported.
        BackboneError: the device does not exist.
    """
    with listen(options.port) as listener:
        port = listener.getsockname()[1]
        folder = model_path(options.model, "--model", (Path.cwd(),))
        path = Path(folder).expanduser()
        # Clients load the tokenizer from the first name.
        names = (str(path.resolve()) if path.is_dir() else folder, folder, options.model)
        base_model = BaseLanguageModel(folder, tuple(dict.fromkeys(names)), options.device, options.dtype)
        service = TinkerService(base_model, options.folder, options.limits)
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
    """Return the ASGI application.

    Args:
        service: handles the requests; closed on shutdown.
        hosts: accepted values of the `Host` header.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(service))
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
        problems = [
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors(include_url=False)
        ]
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return error_response(f"the request is not a valid tinker request: {'; '.join(problems[:3])}{more}", 422)

    @app.exception_handler(StarletteHTTPException)
    def unknown_route(request: Request, error: StarletteHTTPException) -> Response:
        message = (
            f"this server has no {request.method} {request.url.path}; docs/en/serve_tinker.md lists what it supports"
        )
        return error_response(message, error.status_code)

    _add_client_routes(app, service)
    _add_session_routes(app, service)
    _add_model_routes(app, service)
    add_rest_routes(app, service)
    return app


async def _sweep(service: TinkerService) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        try:
            service.sweep()
        except (AstunerError, OSError, ValueError, KeyError) as error:  # e.g. a corrupt checkpoint
            logger.warning("expired sessions and checkpoints could not be removed: {}", error)


def _add_client_routes(app: FastAPI, service: TinkerService) -> None:
    @app.get(f"{API}/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok"}

    @app.post(f"{API}/client/config")
    async def client_config(response: Response) -> dict[str, Any]:
        # The client opens a connection for this request only and does not close it.
        response.headers["Connection"] = "close"
        return {
            "pjwt_auth_enabled": False,
            # The client sends the chunks of a pass in order, which makes gradients deterministic.
            "parallel_fwdbwd_chunks": False,
            "proto_write_fwdbwd": False,  # Clients of 0.20 send JSON.
            "proto_compress_fwdbwd": False,
            # The client splits a batch that would exceed the limit; half of it, because it estimates the size.
            "fwdbwd_max_chunk_bytes_count": min(_MAX_CHUNK_BYTES, service.limits.body_bytes // 2),
            # On this machine, the transport of httpx is fast enough, and it needs no further package.
            "use_pyqwest_transport": False,
        }

    @app.post(f"{API}/client/dynamic_config")
    async def client_dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        base_model = service.base_model
        facts = {"max_context_length": base_model.max_length, "trainable": True, "sampleable": True}
        models = [{"model_name": name, **facts} for name in base_model.names]
        return {"supported_models": models, "extensions": [POLICY_EXTENSION]}


def _add_session_routes(app: FastAPI, service: TinkerService) -> None:
    @app.post(f"{API}/telemetry")
    async def telemetry() -> dict[str, Any]:
        return {"status": "accepted"}  # and discarded

    @app.post(f"{API}/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        created = wire.CreateSessionRequest.model_validate_json(await request.body())
        header = request.headers.get(POLICY_HEADER)
        policy = None if header is None else TinkerPolicy.model_validate_json(header)
        session = service.sessions.create(policy, display_name=created.display_name, metadata=created.user_metadata)
        return {"type": "create_session", "session_id": session.session_id}

    @app.post(f"{API}/sessions/{{session_id}}/finish")
    async def finish(session_id: str, request: Request) -> Response:
        wire.FinishRequest.model_validate_json(await request.body())
        service.finish_session(session_id)
        return Response(status_code=204)

    @app.post(f"{API}/session_heartbeat")
    async def session_heartbeat(request: Request) -> dict[str, Any]:
        heartbeat = wire.SessionRequest.model_validate_json(await request.body())
        service.sessions.touch(heartbeat.session_id)
        return {"type": "session_heartbeat"}


def _add_model_routes(app: FastAPI, service: TinkerService) -> None:
    def add(name: str, request_type: type[_WireModel], handler: Callable[[_WireModel], dict[str, Any]]) -> None:
        async def handle(request: Request) -> dict[str, Any]:
            return handler(request_type.model_validate_json(await request.body()))

        app.post(f"{API}/{name}", name=name)(handle)

    add("create_model", wire.CreateModelRequest, service.create_model)
    add("forward", wire.ForwardRequest, service.run_pass)
    add("optim_step", wire.OptimStepRequest, service.optim_step)
    add("save_weights", wire.SaveWeightsRequest, service.save_weights)
    add("save_weights_for_sampler", wire.SaveWeightsForSamplerRequest, service.save_weights_for_sampler)
    add("load_weights", wire.LoadWeightsRequest, service.load_weights)
    add("unload_model", wire.ModelIdRequest, lambda request: service.unload_model(request.model_id))
    add("create_sampling_session", wire.CreateSamplingSessionRequest, service.create_sampling_session)
    add("asample", wire.SampleRequest, service.sample)

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        body = await request.body()
        if request.headers.get("content-type") == protobuf.MEDIA_TYPE:
            return service.run_pass(protobuf.parse_forward_backward(body), as_protobuf=True)
        return service.run_pass(wire.ForwardBackwardRequest.model_validate_json(body))

    @app.post(f"{API}/cancel_future")
    async def cancel_future(request: Request) -> Response:
        service.futures.cancel(wire.RequestIdRequest.model_validate_json(await request.body()).request_id)
        return Response(status_code=204)

    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        request_id = wire.RetrieveRequest.model_validate_json(await request.body()).request_id
        result = await service.futures.retrieve(request_id, _POLL_SECONDS)
        if result is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return Response(json.dumps(pending), 408, media_type="application/json")
        accepts_protobuf = protobuf.MEDIA_TYPE in request.headers.get("accept", "")
        return await asyncio.to_thread(result_response, result, accepts_protobuf=accepts_protobuf)


def result_response(result: Result, *, accepts_protobuf: bool) -> Response:
    """Return the response with the result of a request.

    Args:
        result: the result.
        accepts_protobuf: whether the client accepts protobuf for samples.
    """
    if isinstance(result, bytes):
        return Response(result, media_type=protobuf.MEDIA_TYPE)
    try:
        if accepts_protobuf and "sequences" in result:
            return Response(protobuf.encode_samples(result), media_type=protobuf.MEDIA_TYPE)
        content = json.dumps(result, allow_nan=False)
    except ValueError as error:  # numbers that are not finite
        content = json.dumps(server_error(error))
    return Response(content, media_type="application/json")

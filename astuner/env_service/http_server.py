"""The HTTP server of environments."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.env_service.addresses import TOKEN_VARIABLE
from astuner.env_service.instances import InstanceTable, ServiceLimits
from astuner.env_service.protocol import (
    STATUS,
    ActionPreference,
    CreatedInstance,
    CreateRequest,
    EnvSource,
    EnvTypeInfo,
    EnvTypeList,
    ErrorResponse,
    Health,
    InstanceInfo,
    ServiceRequestError,
    StepRequest,
    TaskPage,
)
from astuner.errors import ConfigError, ServiceError, short_repr
from astuner.schema import Evaluation, StepResult, TaskProfile
from astuner.system.localhost import ADDRESS, BACKLOG, listening_socket, local_hosts, rejection_reason

_MAX_BODY_BYTES = 8 * 2**20
_MAX_PAGE = 1000
_SHUTDOWN_SECONDS = 3
_LOCAL = (ADDRESS, "localhost", "::1")
_OPEN_PATHS = ("/health", "/openapi.json")


def serve(
    env_types: Mapping[str, str],
    host: str,
    port: int,
    token: str,
    search: Sequence[Path],
    limits: ServiceLimits,
    on_ready: Callable[[str], None],
) -> None:
    """Serve environments until SIGINT or SIGTERM.

    Args:
        env_types: the environments, `FAMILY/NAME`, `FAMILY/*` or `package.module->Class`, by the names under which
            clients know them.
        host: the address to listen on.
        port: the port; 0 selects a free one.
        token: the token that clients must send; "" for none.
        search: the folders in which to search for `package.module->Class`.
        on_ready: called with the address when the service accepts requests.

    Raises:
        ConfigError: an address other than 127.0.0.1 is served without a token.
        ServiceError: the port is in use, the environments cannot be imported, or the process that starts them has
            ended.
    """
    if host not in _LOCAL and not token:
        raise ConfigError(
            f"--host {host} can be reached from other machines, which could run code through the environments; "
            f"set the environment variable {TOKEN_VARIABLE} (or --token), or use --host {ADDRESS}"
        )
    folders = tuple(str(Path(folder).absolute()) for folder in (Path.cwd(), *search))
    with _listen(host, port) as listener:
        asyncio.run(_serve(InstanceTable(env_types, folders, limits), host, token, listener, on_ready))


async def _serve(
    table: InstanceTable, host: str, token: str, listener: socket.socket, on_ready: Callable[[str], None]
) -> None:
    port = listener.getsockname()[1]
    hosts = [*local_hosts(port), f"[::1]:{port}"] if host in _LOCAL else None
    config = uvicorn.Config(
        create_app(table, token, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )
    address = f"[{host}]" if ":" in host else host
    try:
        await table.start()
        on_ready(f"http://{address}:{port}")
        await _serve_until_end(uvicorn.Server(config), listener, table)
    finally:
        await table.close()


async def _serve_until_end(server: uvicorn.Server, listener: socket.socket, table: InstanceTable) -> None:
    """Serve until a signal ends the server; raise an error if the process that starts environments ends earlier."""
    has_failed = False

    async def watch() -> None:
        nonlocal has_failed
        await table.wait()
        if not server.should_exit:  # the end of the service ends the table, too
            has_failed = server.should_exit = True

    watching = asyncio.create_task(watch())
    try:
        await server.serve([listener])
    finally:
        watching.cancel()
    if has_failed:
        raise ServiceError("the process that starts environments has ended, so the environment service ends, too")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ServiceError(
            f"the environment service cannot listen on {host}, port {port}: {error.strerror or error}; give another "
            "--host or --port, or --port 0 for any free port"
        ) from error


def create_app(table: InstanceTable, token: str, hosts: Collection[str] | None) -> FastAPI:
    """Return the ASGI application.

    Args:
        token: the token that clients must send; "" for none.
        hosts: the accepted values of the `Host` header; None for any.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await table.close()  # uvicorn then raises the signal that it has received

    app = FastAPI(title="astuner environment service", version="1", redoc_url=None, lifespan=lifespan)
    app.add_middleware(_CheckedRequests, token=token, hosts=hosts)

    @app.exception_handler(ServiceRequestError)
    def failed(_request: Request, error: ServiceRequestError) -> Response:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    def invalid(_request: Request, error: RequestValidationError) -> Response:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:3]]
        return _error_response(ServiceRequestError("invalid_request", "; ".join(problems)))

    @app.exception_handler(StarletteHTTPException)
    def unknown_route(request: Request, error: StarletteHTTPException) -> Response:
        message = f"the service has no {request.method} {request.url.path}; GET /openapi.json describes what it has"
        if isinstance(error.__cause__, ServiceRequestError):  # raised while the body was read
            return _error_response(error.__cause__)
        if request.scope.get("endpoint") is not None and error.status_code == 400:
            message = f"the body of the request cannot be read: {error.detail}"
        response = _error_response(ServiceRequestError("invalid_request", message))
        response.status_code = error.status_code
        return response

    _add_environment_routes(app, table)
    _add_instance_routes(app, table)
    return app


_ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorResponse, "description": "An error."}}


def _source(
    env_type: Annotated[str, Query(description="The name of the environment in the service.")],
    params: Annotated[str, Query(description="The keyword arguments of the environment, as a JSON object.")] = "{}",
    action_preference: Annotated[
        ActionPreference, Query(description="The form of actions that the client prefers.")
    ] = "text",
) -> EnvSource:
    try:
        arguments = json.loads(params)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ServiceRequestError("invalid_request", f"params is {short_repr(params)}; expected a JSON object")
    return EnvSource(env_type=env_type, params=arguments, action_preference=action_preference)


_Source = Annotated[EnvSource, Depends(_source)]
_Split = Annotated[str, Query(description="The split of the task.")]
_WithReference = Annotated[bool, Query(description="Whether profiles contain the solution of the task.")]
_InstanceId = Annotated[str, PathParameter(description="The id of the instance.")]


def _add_environment_routes(app: FastAPI, table: InstanceTable) -> None:
    @app.get("/health")
    async def health() -> Health:
        """Return the state and the limits of the service. Needs no token."""
        limits = table.limits
        return Health(
            instances=table.count,
            max_instances=limits.max_instances,
            lease_seconds=limits.lease_seconds,
            step_timeout=limits.step_timeout,
        )

    @app.get("/v1/env_types", responses=_ERRORS)
    async def env_types() -> EnvTypeList:
        """Return the names of the environments."""
        return EnvTypeList(env_types=list(table.env_types))

    @app.get("/v1/env_type", responses=_ERRORS)
    async def env_type(source: _Source) -> EnvTypeInfo:
        """Return the splits and tools of an environment."""
        return await table.describe(source)

    @app.get("/v1/tasks", responses=_ERRORS, response_model=TaskPage)
    async def tasks(
        source: _Source,
        split: _Split,
        offset: Annotated[int, Query(ge=0, description="The number of tasks to skip.")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="The maximum number of tasks.")] = 100,
        profiles: Annotated[bool, Query(description="Whether to return profiles, not only ids.")] = False,
        with_reference: _WithReference = False,
    ) -> Response:
        """Return some tasks of a split, in a fixed order."""
        page = {"split": split, "offset": offset, "limit": limit, "profiles": profiles}
        return _json(await table.ask_catalog(source, "tasks", **page, with_reference=with_reference))

    @app.get("/v1/task", responses=_ERRORS, response_model=TaskProfile)
    async def task(
        source: _Source,
        split: _Split,
        task_id: Annotated[str, Query(description="The task.")],
        with_reference: _WithReference = False,
    ) -> Response:
        """Return the profile of a task."""
        return _json(
            await table.ask_catalog(source, "task", split=split, task_id=task_id, with_reference=with_reference)
        )


def _add_instance_routes(app: FastAPI, table: InstanceTable) -> None:
    @app.get("/v1/instances", responses=_ERRORS)
    async def instances() -> list[InstanceInfo]:
        """Return the running instances."""
        return table.list_instances()

    @app.post("/v1/instances", responses=_ERRORS, response_model=CreatedInstance)
    async def create(body: CreateRequest) -> Response:
        """Create an instance and start its task. A repeated request returns the same instance."""
        return _json(await table.create(body))

    @app.post("/v1/instances/{instance_id}/step", responses=_ERRORS, response_model=StepResult)
    async def step(instance_id: _InstanceId, body: StepRequest) -> Response:
        """Perform a step. A repeated request returns the stored result."""
        return _json(await table.step(instance_id, body))

    @app.post("/v1/instances/{instance_id}/evaluate", responses=_ERRORS, response_model=Evaluation)
    async def evaluate(instance_id: _InstanceId) -> Response:
        """Return the score so far."""
        return _json(await table.evaluate(instance_id))

    @app.delete("/v1/instances/{instance_id}", status_code=204, responses=_ERRORS)
    async def release(instance_id: _InstanceId) -> None:
        """Release an instance. Succeeds also if it does not exist."""
        await table.release(instance_id)

    @app.post("/v1/clients/{client_id}/heartbeat", status_code=204, responses=_ERRORS)
    async def heartbeat(client_id: str) -> None:
        """Renew the lease of a client, whose instances are released after `lease_seconds` without a heartbeat."""
        table.renew(client_id)

    @app.delete("/v1/clients/{client_id}", status_code=204, responses=_ERRORS)
    async def release_client(client_id: str) -> None:
        """Release the instances of a client."""
        await table.release_client(client_id)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _error_response(error: ServiceRequestError) -> Response:
    headers = {"Retry-After": "1"} if error.info.code in ("too_many_instances", "shutting_down") else None
    body = ErrorResponse(error=error.info).model_dump_json(exclude_none=True)
    return Response(body, STATUS[error.info.code], headers, media_type="application/json")


class _CheckedRequests:
    """Middleware that rejects requests without the token, from web pages, and with large bodies."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] | None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._problem(scope["path"], headers)
        if error is not None:
            await _error_response(error)(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > _MAX_BODY_BYTES:
                raise ServiceRequestError("too_large", f"the body has more than {_MAX_BODY_BYTES:,} bytes")
            return message

        await self._app(scope, limited, send)

    def _problem(self, path: str, headers: Mapping[bytes, bytes]) -> ServiceRequestError | None:
        if self._hosts is not None:
            texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
            if (reason := rejection_reason(texts, self._hosts)) is not None:
                return ServiceRequestError("unauthorized", reason)
        if path in _OPEN_PATHS or not self._expected:
            return None
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return ServiceRequestError(
                "unauthorized",
                "the token is missing or wrong; set the environment variable "
                f"{TOKEN_VARIABLE} to the token of the service",
            )
        return None

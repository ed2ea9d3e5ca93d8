"""The gateway's ASGI application."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from loguru import logger
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astuner.errors import AstunerError, EpisodeStopped, InvalidRequestError
from astuner.gateway.sessions import Answers, EpisodeSession, GatewayCall, KeyClaims, RequestIdentity
from astuner.model_tuner.http_api.api_errors import DRAINING, INVALID_KEY, ApiError, to_api_error
from astuner.model_tuner.http_api.dialects import (
    DIALECTS,
    TOKEN_COUNTING,
    Dialect,
    from_json,
    openai_error,
    to_event,
    to_json,
)
from astuner.model_tuner.http_api.openai_completions import ChatRequest, parse_chat_request
from astuner.model_tuner.remote import CHAT_PATH, KEY_PATH
from astuner.run_record.jsonable import encode

if TYPE_CHECKING:
    from astuner.gateway.http_server import Gateway

# Seconds until a stream starts without an answer, and between the comments that keep it alive.
_KEEP_ALIVE_SECONDS = 10.0
# A body that is too large is read and discarded up to this multiple of the limit. Beyond it, the connection is closed.
_DISCARDED_BODIES = 8
_REQUEST_ID_HEADERS = (b"idempotency-key", b"x-client-request-id", b"x-request-id")
_KEEP_ALIVE = b": the model is sampling\n\n"
_ENDED = ApiError(401, "the episode of this API key has ended", code="invalid_api_key")


_REMOTE = Dialect(
    path=f"/v1{CHAT_PATH}",
    parse=lambda body, _tuner: parse_chat_request(body),
    body=lambda answers, *_: {"answer": encode(answers[0], lambda text: text)},
    events=lambda *_: iter(()),
    error=openai_error,
    error_event=lambda error: (None, openai_error(error)),
)
"""The API of `RemoteModelTuner`."""


class _RequestFailed(Exception):
    """Ends the handling of a request with an error response."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class _ClientGone(Exception):
    """The client has closed the connection."""


def create_app(gateway: Gateway) -> FastAPI:
    """Return the ASGI application of a gateway."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.router.routes.extend(
        Route(dialect.path, _DialectRoute(gateway, dialect), methods=["POST"]) for dialect in (*DIALECTS, _REMOTE)
    )
    app.router.routes.append(Route(TOKEN_COUNTING.path, _CountRoute(gateway, TOKEN_COUNTING), methods=["POST"]))

    @app.post(f"/v1{KEY_PATH}")
    async def key(request: Request) -> Response:
        admitted = gateway.admit(_Headers(request.scope).key())
        if admitted is None:
            return _error_response(INVALID_KEY)
        claims, _ = admitted
        if not claims.issues_keys:
            error = ApiError(403, "this API key is for one agent of the episode", "permission_error", "wrong_key")
            return _error_response(error)
        try:
            content = from_json(await request.body())
            agent_name, target_tag = str(content["agent_name"]), str(content["target_tag"])
        except (ValueError, LookupError, TypeError):
            error = ApiError(400, 'the body must be {"agent_name": …, "target_tag": …}')
            return _error_response(error)
        other = replace(claims, agent_name=agent_name, target_tag=target_tag, debug_model=None, issues_keys=False)
        return Response(to_json({"api_key": gateway.signer.sign(other)}), media_type="application/json")

    @app.exception_handler(StarletteHTTPException)
    def unknown_route(request: Request, error: StarletteHTTPException) -> Response:
        paths = ", ".join([*(dialect.path for dialect in DIALECTS), TOKEN_COUNTING.path, "/v1/models"])
        message = f"the gateway has no {request.method} {request.url.path}; it has {paths}"
        return _error_response(ApiError(error.status_code, message, code="unknown_url"))

    @app.get("/v1/models")
    def models(request: Request) -> Response:
        admitted = gateway.admit(_Headers(request.scope).key())
        if admitted is None:
            return _error_response(INVALID_KEY)
        names = gateway.model_names(admitted[1])
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "astuner"} for name in names]
        return Response(to_json({"object": "list", "data": data}), media_type="application/json")

    return app


def _error_response(error: ApiError) -> Response:
    return Response(to_json(openai_error(error)), error.status, media_type="application/json")


class _Headers(dict[bytes, bytes]):
    """The headers of a request by lower-case name."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope["headers"])

    def key(self) -> str:
        """Return the API key; "" if there is none."""
        scheme, _, key = self.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
        return (self.get(b"x-api-key") or self.get(b"api-key") or b"").decode("latin-1")


class _DialectRoute:
    """Handles the requests of one API.

    It is a plain ASGI application, because Starlette's requests cost more time.
    """

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway, self._dialect = gateway, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(_Headers(scope), receive, send)
        except _RequestFailed as failure:
            await _send_json(send, failure.error.status, self._dialect.error(failure.error), failure.error.headers())
        except _ClientGone:
            pass

    async def _answer(self, headers: _Headers, receive: Receive, send: Send) -> None:
        claims, session = self._admit(headers)
        body = await self._read_body(headers, receive)
        digest = hashlib.blake2b(body, digest_size=16, key=hashlib.blake2b(headers.key().encode()).digest())
        digest.update(self._dialect.path.encode())
        request_id = next((headers[name] for name in _REQUEST_ID_HEADERS if name in headers), b"").decode("latin-1")
        count = headers.get(b"x-stainless-retry-count", b"")
        identity = RequestIdentity(digest.digest(), request_id, int(count) if count.isdigit() else None)
        # Nothing is awaited between the check of the session and the start of the call.
        call = None if session.is_closed else session.find_retried(identity)
        request = self._parse(session, body)
        if call is None:
            call = self._start(session, claims, identity, request)
        call.waiting += 1
        is_delivered = False
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            is_delivered = await self._respond(session, call, request, gone, send)
        finally:
            gone.cancel()
            session.release(call, is_delivered=is_delivered)

    def _admit(self, headers: _Headers) -> tuple[KeyClaims, EpisodeSession]:
        admitted = self._gateway.admit(headers.key())
        if admitted is None:
            raise _RequestFailed(INVALID_KEY)
        return admitted

    async def _read_body(self, headers: _Headers, receive: Receive) -> bytes:
        limit = self._gateway.settings.max_body_bytes
        too_large = ApiError(
            413,
            f"the body has more than {limit:,} bytes, the limit of gateway.max_body_bytes; send a smaller one, "
            "or raise the limit",
            code="request_too_large",
        )
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > _DISCARDED_BODIES * limit:
            raise _RequestFailed(too_large)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > _DISCARDED_BODIES * limit:
                raise _RequestFailed(too_large)
            if not message.get("more_body"):
                break
        if size > limit:  # a client that still sends its body may not read the response
            raise _RequestFailed(too_large)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _parse(self, session: EpisodeSession, body: bytes) -> ChatRequest:
        try:
            content = from_json(body)
        except ValueError as error:
            raise _RequestFailed(ApiError(400, f"the body is not JSON: {error}", code="invalid_json")) from None
        try:
            request: ChatRequest = self._dialect.parse(content, session.tuner)
        except InvalidRequestError as error:
            session.note_error(error)
            raise _RequestFailed(to_api_error(error)) from None
        return request

    def _target(self, session: EpisodeSession, request: ChatRequest, claims: KeyClaims) -> str:
        if request.model in self._gateway.names_of_trained_model:
            return claims.target_tag
        if request.model in session.tuner.forwarded_models:
            return str(request.model)
        names = ", ".join(self._gateway.model_names(session))
        message = (
            f"unknown model {request.model!r}; expected one of: {names}. To add another endpoint, name it in "
            "rollout.frozen_models. To add a name of the model in training, list it in gateway.model_names"
        )
        raise _RequestFailed(ApiError(404, message, code="model_not_found", param="model"))

    def _start(
        self, session: EpisodeSession, claims: KeyClaims, identity: RequestIdentity, request: ChatRequest
    ) -> GatewayCall:
        gateway = self._gateway
        if session.is_closed:
            raise _RequestFailed(_ENDED)
        if gateway.is_draining:
            raise _RequestFailed(DRAINING)
        target = self._target(session, request, claims)
        try:
            session.check_alive()
            arguments = request.chat_arguments()
        except AstunerError as error:
            raise _RequestFailed(to_api_error(error)) from None
        if not gateway.reserve_call():
            session.note_retryable_error(identity)
            message = (
                f"the gateway has {gateway.settings.max_concurrent_calls} calls in progress, the limit of "
                "gateway.max_concurrent_calls; try again"
            )
            raise _RequestFailed(ApiError(429, message, "rate_limit_error", "too_many_calls", retry_after=1))
        arguments |= {"agent_name": claims.agent_name, "target_tag": target}
        # The debug model is that of the key's target, and not of a model that the request names.
        if claims.debug_model is not None and target == claims.target_tag:
            arguments["debug_model"] = session.debug_models[claims.debug_model]
        call = session.start(identity, self._collect(session, arguments))
        call.task.add_done_callback(lambda _: gateway.release_call())  # even if it is cancelled before it starts
        return call

    async def _collect(self, session: EpisodeSession, arguments: Mapping[str, Any]) -> Answers:
        """Return the answers of a call, and note its error."""
        try:
            answer = await session.tuner.chat(**arguments)
        except (Exception, EpisodeStopped) as error:
            session.note_error(error)
            raise
        session.tuner.rejection = None
        return (answer, *answer.alternatives)

    async def _respond(
        self, session: EpisodeSession, call: GatewayCall, request: ChatRequest, gone: asyncio.Task[None], send: Send
    ) -> bool:
        """Send the answers of a call, and return whether the client has received them."""
        is_started = False
        waiting: tuple[asyncio.Task[Any], ...] = (call.task, gone)
        while not call.task.done():
            timeout = _KEEP_ALIVE_SECONDS if request.stream else None
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return False
            if not call.task.done():
                if not is_started:
                    await _start_stream(send)
                is_started = True
                await _send_part(send, _KEEP_ALIVE)
        error = _error_of(call)
        if error is not None and is_started:
            await _send_part(send, to_event(*self._dialect.error_event(error)))
            await _send_part(send, b"", more=False)
            return True
        if error is not None:
            raise _RequestFailed(error)
        answers, model = call.task.result(), request.model or session.tuner.model_name
        if not request.stream:
            await _send_json(send, 200, self._dialect.body(answers, request, model, session.tuner.decode_token))
            return not gone.done()
        if not is_started:
            await _start_stream(send)
        for name, data in self._dialect.events(answers, request, model, session.tuner.decode_token):
            await _send_part(send, to_event(name, data))
            await asyncio.sleep(0)  # a client that has gone is noticed
            if gone.done():
                return False
        await _send_part(send, self._dialect.end)
        await _send_part(send, b"", more=False)
        return True


class _CountRoute(_DialectRoute):
    async def _answer(self, headers: _Headers, receive: Receive, send: Send) -> None:
        claims, session = self._admit(headers)
        request = self._parse(session, await self._read_body(headers, receive))
        if self._target(session, request, claims) in session.tuner.forwarded_models:
            message = "tokens are counted for the model in training only, and another model answers these requests"
            raise _RequestFailed(ApiError(400, message, code="unsupported_parameter", param="model"))
        try:
            count = session.tuner.count_prompt_tokens(request.messages, request.tools)
        except AstunerError as error:
            raise _RequestFailed(to_api_error(error)) from None
        await _send_json(send, 200, {"input_tokens": count})


def _error_of(call: GatewayCall) -> ApiError | None:
    if call.task.cancelled():
        return _ENDED
    error = call.task.exception()
    if error is not None and not isinstance(error, AstunerError | EpisodeStopped):
        logger.opt(exception=error).debug("a call at the gateway failed")
    return None if error is None else to_api_error(error)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(
    send: Send, status: int, content: Mapping[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = to_json(content)
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
    await send({"type": "http.response.body", "body": body})


async def _start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, part: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})

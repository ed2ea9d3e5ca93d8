"""HTTP clients whose requests the model answers in this process, without a socket.

The requests, answers and errors are those of the gateway, so that an agent behaves the same with both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from astuner.errors import EpisodeError
from astuner.model_tuner.framework_adapters import AgentModel, ApiConnection
from astuner.model_tuner.http_api.api_errors import ApiError, to_api_error
from astuner.model_tuner.http_api.dialects import DIALECTS, Dialect, from_json, to_event, to_json
from astuner.model_tuner.tuner import ModelTuner
from astuner.system.loop_thread import run_to_end

# The address that clients show; no request is sent to it.
_BASE_URL = "http://in-process.invalid/v1"


class AsyncInProcessTransport(httpx.AsyncBaseTransport):
    """Answers an `httpx.AsyncClient`'s requests with one agent's model."""

    def __init__(self, model: AgentModel) -> None:
        self._model = model

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request. If the client's time limit for reading expires, the call is cancelled."""
        body = await request.aread()
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("read")):
                return await _respond(self._model, request, body)
        except TimeoutError as error:
            raise httpx.ReadTimeout("the model did not answer within the time limit of the client") from error


class InProcessTransport(httpx.BaseTransport):
    """Answers an `httpx.Client`'s requests with one agent's model; the thread waits."""

    def __init__(self, model: AgentModel) -> None:
        self._asynchronous = AsyncInProcessTransport(model)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request (see `AsyncInProcessTransport`)."""
        request.read()
        return run_to_end(self._asynchronous.handle_async_request(request))


def connect(model: AgentModel) -> ApiConnection:
    """Return a connection to a model in this process."""
    return ApiConnection(
        _BASE_URL,
        "in-process",  # clients require a key
        httpx.Client(transport=InProcessTransport(model), base_url=_BASE_URL, timeout=None),
        httpx.AsyncClient(transport=AsyncInProcessTransport(model), base_url=_BASE_URL, timeout=None),
    )


async def _respond(model: AgentModel, request: httpx.Request, body: bytes) -> httpx.Response:
    path = request.url.path
    dialect = next((dialect for dialect in DIALECTS if dialect.path == path and request.method == "POST"), None)
    if dialect is not None:
        try:
            return await _answer(model, dialect, body)
        except ValueError as error:
            return _error_response(dialect, ApiError(400, f"the body is not JSON: {error}", code="invalid_json"))
        except Exception as error:  # errors of many types become responses, as at any server
            return _error_response(dialect, to_api_error(error))
    if (request.method, path) == ("GET", "/v1/models"):
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "astuner"} for name in _model_names(model.tuner)
        ]
        return _json_response(200, {"object": "list", "data": data})
    paths = ", ".join([*(dialect.path for dialect in DIALECTS), "/v1/models"])
    message = f"the model in training has no {request.method} {path}; it has {paths}"
    return _error_response(DIALECTS[0], ApiError(404, message, code="unknown_url"))


async def _answer(model: AgentModel, dialect: Dialect, body: bytes) -> httpx.Response:
    tuner = model.tuner
    request = dialect.parse(from_json(body), tuner)
    name = str(request.model)
    if name not in _model_names(tuner):
        message = f"unknown model {name!r}; expected one of: {', '.join(_model_names(tuner))}"
        return _error_response(dialect, ApiError(404, message, code="model_not_found", param="model"))
    if name in tuner.forwarded_models:
        model = replace(model, target_tag=name, debug_model=None)
    try:
        answer = await model.chat(**request.chat_arguments())
    except EpisodeError as error:
        tuner.rejection = error
        raise
    tuner.rejection = None
    answers = (answer, *answer.alternatives)
    if not request.stream:
        return _json_response(200, dialect.body(answers, request, name, tuner.decode_token))
    events = [to_event(kind, data) for kind, data in dialect.events(answers, request, name, tuner.decode_token)]

    def mark_cut() -> None:
        for each in answers:
            tuner.mark_cut(each.call)

    stream = _EventStream([*events, dialect.end], mark_cut)
    return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=stream)


def _model_names(tuner: ModelTuner) -> tuple[str, ...]:
    return (*tuner.names_of_trained_model, *tuner.forwarded_models)


def _error_response(dialect: Dialect, error: ApiError) -> httpx.Response:
    return _json_response(error.status, dialect.error(error), error.headers())


def _json_response(
    status: int, content: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()
) -> httpx.Response:
    return httpx.Response(status, headers=[(b"content-type", b"application/json"), *headers], content=to_json(content))


class _EventStream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A streamed answer's events, and the end of the stream.

    If the client closes the stream before it has read the last event, `on_cut` is called.
    """

    def __init__(self, parts: Sequence[bytes], on_cut: Callable[[], object]) -> None:
        self._parts = parts
        self._on_cut = on_cut
        self._is_read = False

    def __iter__(self) -> Iterator[bytes]:
        for index, part in enumerate(self._parts):
            # The last part is the end mark, for which not every client waits.
            self._is_read = index >= len(self._parts) - 2
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        if not self._is_read:
            self._is_read = True
            self._on_cut()

    async def aclose(self) -> None:
        self.close()

"""`astuner serve`: serves a model to any client, and writes its conversations and the feedback of users to a file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

from astuner.gateway.http_server import Gateway
from astuner.launcher.chat import find_model, open_engine, unlimited_calls
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record.files import JsonLines
from astuner.run_record.jsonable import to_jsonable
from astuner.system.localhost import listen, local_hosts, rejection_reason
from astuner.system.redaction.redactor import redact
from astuner.task_sources.tracing.trace import Feedback, TraceProblem, read_feedback, read_tools

TRACE_HEADER = "x-trace-id"
_FORWARDED_HEADERS = ("content-type", "accept", "anthropic-version", "anthropic-beta")
_SHUTDOWN_SECONDS = 5


def serve(
    model: str,
    traces: Path,
    exp_dir: Path,
    port: int,
    temperature: float,
    max_tokens: int,
    renderer: str,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model on 127.0.0.1 until SIGINT or SIGTERM.

    Args:
        model: a run, the folder of a model, its Hugging Face name, or `package.module->function`.
        traces: the file of JSON lines to which conversations and feedback are appended.
        temperature: the temperature of requests that have none.
        max_tokens: the longest answer, in tokens.
        renderer: as `model.renderer`; "" for that of the run, or auto.
        on_ready: gets the address once the server accepts connections.

    Raises:
        AstunerError: the model cannot be loaded, the port is in use, or the file of the traces cannot be written.
    """
    path, own_renderer = find_model(model, exp_dir)
    codec = ChatCodec(load_tokenizer(path), renderer or own_renderer)
    with listen(port) as listener, open_engine(path, codec, None) as engine:
        served = ServedModel(engine, codec, unlimited_calls(engine, temperature, max_tokens), (model, path), traces)
        port = listener.getsockname()[1]
        app = create_app(served, port)
        config = uvicorn.Config(
            app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_SECONDS
        )
        on_ready(f"http://127.0.0.1:{port}/v1")
        uvicorn.Server(config).run([listener])


class ServedModel:
    """A model behind a gateway. Each request is a separate episode, whose calls are appended to the traces."""

    def __init__(
        self, engine: LlmEngine, codec: ChatCodec, settings: CallSettings, names: Sequence[str], traces: Path
    ) -> None:
        self._engine, self._codec, self._settings = engine, codec, settings
        self._gateway = Gateway(model_names=names)
        self._traces = JsonLines(traces)
        self._client: httpx.AsyncClient

    async def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, trace_id: str
    ) -> httpx.Response:
        """Forward a request to the gateway, append its calls to the traces, and return the response."""
        tuner = ModelTuner(
            self._engine,
            self._codec,
            self._settings,
            episode_id=trace_id,
            seed=uuid.uuid4().int % 2**31,
            endpoints=self._gateway,
        )
        with self._gateway.episode(tuner):
            endpoint = self._gateway.open_endpoint(tuner, "", "default", None)
            forwarded = {name: headers[name] for name in _FORWARDED_HEADERS if name in headers}
            url = f"{endpoint.base_url}/{path}"
            authorization = {"authorization": f"Bearer {endpoint.api_key}"}
            response = await self._client.request(method, url, content=body, headers={**forwarded, **authorization})
        for call in tuner.calls:
            if not call.cut:
                tools = read_tools(json.loads(body).get("tools"))
                row = {"trace_id": trace_id, "messages": list(call.messages), "created": call.end_time}
                self._write({**row, "tools": list(tools)} if tools else row)
        return response

    def add_feedback(self, trace_id: str, feedback: Feedback) -> None:
        """Append feedback on a trace."""
        given = {"rating": feedback.rating, "edit": feedback.edit, "comment": feedback.comment}
        row = {"trace_id": trace_id} | {name: value for name, value in given.items() if value not in (None, "")}
        self._write(row)

    def _write(self, row: Mapping[str, object]) -> None:
        # API keys must not be written to files.
        self._traces.append({name: to_jsonable(value, redact) for name, value in row.items()})

    @contextlib.asynccontextmanager
    async def connected(self, _app: FastAPI) -> AsyncIterator[None]:
        """Keep connections to the gateway during the block; then stop the gateway."""
        # Proxies of the environment do not lead to this machine.
        async with httpx.AsyncClient(timeout=None, trust_env=False) as self._client:
            yield
        await asyncio.to_thread(self._gateway.close)


def create_app(served: ServedModel, port: int) -> FastAPI:
    """Return the application: the APIs of the gateway, and `POST /v1/feedback`."""
    app = FastAPI(lifespan=served.connected, docs_url=None, redoc_url=None, openapi_url=None)
    hosts = local_hosts(port)

    @app.middleware("http")
    async def local_clients_only(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        reason = rejection_reason(request.headers, hosts)
        return _error(403, reason) if reason is not None else await call_next(request)

    @app.post("/v1/feedback")
    async def feedback(request: Request) -> Response:
        try:
            row = await request.json()
            if not isinstance(row, dict) or not isinstance(row.get("trace_id"), str):
                raise TraceProblem("expected an object with trace_id, and rating, edit or comment")
            given = read_feedback(row)
            if given == Feedback():
                raise TraceProblem("expected rating, edit or comment")
        except (TraceProblem, ValueError) as problem:
            return _error(400, str(problem))
        served.add_feedback(row["trace_id"], given)
        return Response(status_code=204)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def forward(request: Request, path: str) -> Response:
        trace_id = request.headers.get(TRACE_HEADER) or uuid.uuid4().hex
        body = await request.body()
        answer = await served.answer(request.method, path, request.headers, body, trace_id)
        headers = {TRACE_HEADER: trace_id}
        return Response(answer.content, answer.status_code, headers, answer.headers.get("content-type"))

    return app


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Response(json.dumps({"error": error}), status, media_type="application/json")

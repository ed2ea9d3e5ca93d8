"""An OpenAI-compatible completions server on 127.0.0.1 that samples from an engine, in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from astuner.llm_engine.protocol import LlmEngine
from astuner.schema import OutputConstraint, SamplingParams


class Request(BaseModel):
    """The supported part of vLLM's request. As in vLLM, missing parameters have defaults that are not neutral."""

    model: str
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int = 1
    min_p: float = 0.9
    repetition_penalty: float = 1.3
    presence_penalty: float = 0.5
    frequency_penalty: float = 0.5
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stop: list[str] = []
    include_stop_str_in_output: bool = False
    structured_outputs: dict[str, Any] | None = None


def _constraint(structured_outputs: dict[str, Any] | None) -> OutputConstraint | None:
    if structured_outputs is None:
        return None
    return OutputConstraint("response_format", f"start: %json {structured_outputs['json']}")


@contextlib.contextmanager
def serving(
    engine: LlmEngine,
    *,
    api_key: str | None = None,
    leave_out: tuple[str, ...] = (),
    model: str = "tiny",
    port: int = 0,
) -> Iterator[str]:
    """Serve `engine` and yield the base URL.

    Args:
        engine: the engine to sample from.
        api_key: key that clients must send.
        leave_out: parts of the response to omit: `token_ids`, `logprobs`.
        model: the model's name on the server.
        port: the port; 0 for a free port.
    """
    app = FastAPI()

    def check(authorization: str | None) -> None:
        if api_key is not None and authorization != f"Bearer {api_key}":
            raise HTTPException(401, "wrong key")

    @app.get("/health")
    def health() -> None:
        """Respond with status 200."""

    @app.get("/v1/models")
    def models(authorization: str | None = Header(None)) -> Any:
        check(authorization)
        return {"object": "list", "data": [{"id": model, "max_model_len": engine.max_model_len}]}

    @app.post("/v1/completions")
    async def complete(request: Request, authorization: str | None = Header(None)) -> Any:
        check(authorization)
        neutral = (request.min_p, request.repetition_penalty)
        if neutral != (0.0, 1.0):
            raise HTTPException(501, f"the engine does not support these parameters: {neutral}")
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            seed=request.seed,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            stop=tuple(request.stop) if request.include_stop_str_in_output else (),
            top_logprobs=request.logprobs or 0,
            constraint=_constraint(request.structured_outputs),
        )
        completion = await engine.generate(request.prompt, params)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": completion.finish_reason}
        if request.return_token_ids and "token_ids" not in leave_out:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": request.prompt}
        if request.logprobs is not None and "logprobs" not in leave_out:
            name = "token_id:{}" if request.return_tokens_as_token_ids else "text of {}"
            sampled = zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=False)
            # As in vLLM, the sampled token comes first, also if it is not among the most likely ones.
            tops = [{name.format(token): value for token, value in ((i, p), *top)} for i, p, top in sampled]
            choice["logprobs"] = {"token_logprobs": completion.logprobs, "top_logprobs": tops}
        return {"object": "text_completion", "model": request.model, "choices": [choice]}

    with listening(port) as sock:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    """Yield a socket that is bound to a port of 127.0.0.1; 0 for a free port."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        yield sock

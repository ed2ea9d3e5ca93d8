"""Clients that disconnect, retry, or send too much, and the end of episodes and of the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from astuner.config.services import GatewayConfig
from astuner.gateway.http_server import Gateway
from astuner.gateway.routes import _DialectRoute
from astuner.gateway.sessions import KeyClaims, RequestIdentity
from astuner.model_tuner.framework_adapters import OpenAiEndpoint
from astuner.model_tuner.http_api.dialects import DIALECTS
from astuner.model_tuner.http_api.openai_completions import parse_chat_request
from astuner.model_tuner.tuner import ModelTuner
from tests.gateway.conftest import MakeTuner, SlowEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]
LONG = " ".join(f"w{number}" for number in range(300)) + "<|im_end|>"


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the condition did not become true"
        time.sleep(0.01)


def engine_of(tuner: ModelTuner) -> SlowEngine:
    engine = tuner.engine  # type: ignore[attr-defined]
    assert isinstance(engine, SlowEngine)
    return engine


def connect(endpoint: OpenAiEndpoint, headers: str = "", **body: Any) -> socket.socket:
    """Send a request on a raw connection."""
    url = urlsplit(endpoint.base_url)
    content = json.dumps({"model": "astuner", "messages": HI, **body})
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
        f"Content-Length: {len(content)}\r\n{headers}\r\n{content}".encode()
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_call(gateway: Gateway, make_tuner: MakeTuner, stream: bool):
    tuner = make_tuner(engine=SlowEngine)
    engine = engine_of(tuner)
    with gateway.episode(tuner):
        connection = connect(tuner.as_oai_baseurl_apikey(), stream=stream)
        wait_for(lambda: engine.started == 1)
        connection.close()
        wait_for(lambda: engine.cancelled == 1)
        wait_for(lambda: len(tuner.calls) == 1)
    (call,) = tuner.calls
    assert call.cut
    assert not call.trained
    assert call.completion_ids == ()
    assert call.prompt_ids
    assert [message["role"] for message in call.messages] == ["user"]


async def test_the_official_client_that_is_cancelled_cancels_its_call(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(engine=SlowEngine)
    engine = engine_of(tuner)
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(model="astuner", messages=HI), 0.5)
        await asyncio.to_thread(wait_for, lambda: engine.cancelled == 1)
        await asyncio.to_thread(wait_for, lambda: len(tuner.calls) == 1)
    assert [(call.cut, call.trained) for call in tuner.calls] == [(True, False)]


def test_a_client_that_leaves_in_the_middle_of_a_stream_cuts_its_call(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([LONG] * 30, max_tokens=4000, max_calls=30)
    with gateway.episode(tuner):
        # More than the buffers of a connection hold, so that the gateway still sends when the client leaves.
        connection = connect(tuner.as_oai_baseurl_apikey(), stream=True, n=30)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        wait_for(lambda: len(tuner.calls) == 30 and all(call.cut for call in tuner.calls))
    assert not any(call.trained for call in tuner.calls)
    assert all(call.completion_ids for call in tuner.calls)


def test_a_call_in_progress_at_the_end_of_the_episode_is_cut(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(engine=SlowEngine)
    engine = engine_of(tuner)
    statuses: list[int] = []
    with gateway.episode(tuner):
        endpoint = tuner.as_oai_baseurl_apikey()

        def post() -> None:
            response = httpx.post(
                f"{endpoint.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {endpoint.api_key}"},
                json={"model": "astuner", "messages": HI},
                timeout=30,
            )
            statuses.append(response.status_code)

        thread = threading.Thread(target=post)
        thread.start()
        wait_for(lambda: engine.started == 1)
    assert [call.cut for call in tuner.calls] == [True]
    assert engine.cancelled == 1
    thread.join(30)
    assert statuses == [401]


def test_a_retry_of_the_client_joins_the_call_in_progress(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(engine=SlowEngine)
    engine = engine_of(tuner)
    threading.Timer(1.0, lambda: setattr(engine, "is_released", True)).start()
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()
        # The first attempts time out. The SDK repeats them after about half a second.
        with OpenAI(base_url=base_url, api_key=api_key, timeout=0.4, max_retries=4) as client:
            completion = client.chat.completions.create(model="astuner", messages=HI)
    assert completion.choices[0].message.content == "hi"
    assert engine.started == 1
    assert [(call.cut, call.trained) for call in tuner.calls] == [(False, True)]


@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Request-Id"])
def test_a_request_id_tells_retries_from_new_requests(gateway: Gateway, make_tuner: MakeTuner, header: str):
    tuner = make_tuner(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            answers = [
                client.chat.completions.create(model="astuner", messages=HI, extra_headers={header: value})
                for value in ("1", "1", "2")
            ]
            answers.append(client.chat.completions.create(model="astuner", messages=HI))
    assert [answer.choices[0].message.content for answer in answers] == ["a", "a", "b", "c"]
    assert len(tuner.calls) == 3


def test_the_same_request_twice_is_two_calls(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["a<|im_end|>", "b<|im_end|>"])
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            answers = [client.chat.completions.create(model="astuner", messages=HI) for _ in range(2)]
    assert [answer.choices[0].message.content for answer in answers] == ["a", "b"]


def test_calls_above_the_limit_are_rejected_and_retried(make_tuner: MakeTuner):
    gateway = Gateway(GatewayConfig(max_concurrent_calls=1))
    tuner = make_tuner(["a<|im_end|>", "b<|im_end|>"], engine=SlowEngine, endpoints=gateway)
    engine = engine_of(tuner)
    try:
        with gateway.episode(tuner):
            base_url, api_key = tuner.as_oai_baseurl_apikey()
            answers: list[str | None] = []

            def ask() -> None:
                with OpenAI(base_url=base_url, api_key=api_key) as client:
                    completion = client.chat.completions.create(model="astuner", messages=HI)
                    answers.append(completion.choices[0].message.content)

            first = threading.Thread(target=ask)
            first.start()
            wait_for(lambda: engine.started == 1)
            with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                with pytest.raises(openai.RateLimitError) as caught:
                    client.chat.completions.create(model="astuner", messages=HI)
                assert caught.value.response.headers["retry-after"] == "1"
            # The same request again: its client waits, and the call in progress is not its own.
            second = threading.Thread(target=ask)
            second.start()
            time.sleep(0.3)
            engine.is_released = True
            first.join(30)
            second.join(30)
    finally:
        gateway.close()
    assert sorted(map(str, answers)) == ["a", "b"]
    assert len(tuner.calls) == 2


def test_a_body_that_is_too_large_is_rejected(make_tuner: MakeTuner):
    gateway = Gateway(GatewayConfig(max_body_bytes=2000))
    tuner = make_tuner(endpoints=gateway)
    try:
        with gateway.episode(tuner):
            base_url, api_key = tuner.as_oai_baseurl_apikey()
            headers = {"Authorization": f"Bearer {api_key}"}
            body = json.dumps({"model": "astuner", "messages": [{"role": "user", "content": "x" * 3000}]}).encode()
            for content in (body, iter([body])):  # with a content-length, and in chunks
                response = httpx.post(f"{base_url}/chat/completions", headers=headers, content=content)
                assert response.status_code == 413
                assert "gateway.max_body_bytes" in response.json()["error"]["message"]
            with OpenAI(base_url=base_url, api_key=api_key) as client:
                client.chat.completions.create(model="astuner", messages=HI)
    finally:
        gateway.close()
    assert len(tuner.calls) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"messages": [}', b"\xff\xfe", b'{"messages": NaN}'])
def test_a_body_that_is_not_a_request_is_rejected(gateway: Gateway, make_tuner: MakeTuner, body: bytes):
    tuner = make_tuner()
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()
        headers = {"Authorization": f"Bearer {api_key}"}
        response = httpx.post(f"{base_url}/chat/completions", headers=headers, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_gateway_finishes_calls_when_it_closes(make_tuner: MakeTuner):
    gateway = Gateway(GatewayConfig(drain_seconds=20))
    tuner = make_tuner(engine=SlowEngine, endpoints=gateway)
    engine = engine_of(tuner)
    answers: list[str | None] = []
    earlier = set(threading.enumerate())
    with gateway.episode(tuner):
        base_url, api_key = tuner.as_oai_baseurl_apikey()

        def ask() -> None:
            with OpenAI(base_url=base_url, api_key=api_key) as client:
                completion = client.chat.completions.create(model="astuner", messages=HI)
                answers.append(completion.choices[0].message.content)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: engine.started == 1)
        threading.Timer(0.3, lambda: setattr(engine, "is_released", True)).start()
        gateway.close()
        thread.join(30)
        assert answers == ["hi"]
        with (
            pytest.raises(openai.APIConnectionError),
            OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as late,
        ):
            late.chat.completions.create(model="astuner", messages=HI)
    assert len(tuner.calls) == 1
    assert not any(thread.name == "gateway" for thread in set(threading.enumerate()) - earlier)


async def test_a_call_that_is_cut_before_it_starts_makes_room_for_another(make_tuner: MakeTuner):
    gateway = Gateway(GatewayConfig(max_concurrent_calls=1))
    tuner = make_tuner(endpoints=gateway)
    request = parse_chat_request({"model": "astuner", "messages": HI})
    with gateway.episode(tuner) as session:
        claims = KeyClaims(session.number, "", "default", None, session.expires)
        identity = RequestIdentity(b"", "", None)
        call = _DialectRoute(gateway, DIALECTS[0])._start(session, claims, identity, request)
        assert not gateway.reserve_call()
        await session.end()
        assert call.task.cancelled()
        assert gateway.reserve_call()
    assert tuner.calls == ()

"""`astuner serve`: clients of several APIs get answers, and conversations and feedback become traces."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from astuner.launcher.chat import unlimited_calls
from astuner.launcher.serve import ServedModel, create_app
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import SamplingParams
from astuner.system.localhost import listen
from astuner.task_sources.tracing.reader import read_traces
from astuner.task_sources.tracing.trace import Feedback
from tests.scripted_engine import ScriptedEngine

KEY = "sk-" + "canary4Zb81kQpXw7Lr2Tn5Vy9" * 2
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@contextmanager
def serving(tokenizer: Any, traces: Path, answer: str) -> Iterator[str]:
    """Serve a model that always gives the same answer, on a real port; yield the address."""

    def ids(_prompt: Sequence[int], _params: SamplingParams) -> list[int]:
        encoded: list[int] = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        return encoded

    engine = ScriptedEngine(ids, max_model_len=4096)
    settings = unlimited_calls(engine, temperature=1.0, max_tokens=512)
    served = ServedModel(engine, ChatCodec(tokenizer, "qwen3"), settings, ("scripted", "folder"), traces)
    with listen(0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(create_app(served, port), log_config=None, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def address(tokenizer: Any, tmp_path: Path) -> Iterator[str]:
    with serving(tokenizer, tmp_path / "traces.jsonl", f"It is 42, and the key is {KEY}.") as url:
        yield url


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "astuner", "messages": [{"role": "user", "content": text}], **fields}


def test_conversations_and_feedback_become_traces(address: str, tmp_path: Path) -> None:
    chat = f"{address}/chat/completions"
    with httpx.Client(timeout=120, trust_env=False) as client:
        answer = client.post(chat, json=question("6 * 7?", tools=TOOLS), headers={"x-trace-id": "mine"})
        assert (answer.status_code, answer.headers["x-trace-id"]) == (200, "mine")
        first = answer.json()["choices"][0]["message"]["content"]
        assert KEY in first
        longer = question("6 * 7?", tools=TOOLS)
        longer["messages"] += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
        client.post(chat, json=longer, headers={"x-trace-id": "mine"}).raise_for_status()
        generated = client.post(chat, json=question("7 * 6?", stream=True))
        assert "data: [DONE]" in generated.text
        message = client.post(f"{address}/messages", json=question("5?", max_tokens=99), headers={"x-trace-id": "a"})
        assert message.json()["type"] == "message"
        assert client.post(f"{address}/feedback", json={"trace_id": "mine", "rating": "up"}).status_code == 204
        edit = {"trace_id": generated.headers["x-trace-id"], "rating": 0, "edit": "42"}
        assert client.post(f"{address}/feedback", json=edit).status_code == 204
    read = read_traces(tmp_path / "traces.jsonl")
    assert (len(read.traces), read.skipped, read.unmatched) == (3, 0, 0)
    mine, streamed, other = read.traces
    assert [message["role"] for message in mine.main.messages] == ["user", "assistant", "user", "assistant"]
    assert len(mine.conversations) == 1
    assert mine.main.tools == tuple(TOOLS)
    assert (mine.feedback, streamed.feedback) == (Feedback(1.0), Feedback(0.0, "42"))
    assert (other.trace_id, other.question) == ("a", "5?")
    assert KEY not in (tmp_path / "traces.jsonl").read_text()


def test_bad_requests(address: str, tmp_path: Path) -> None:
    with httpx.Client(timeout=120, trust_env=False) as client:
        for body, problem in (
            ({"rating": 1}, "expected an object with trace_id"),
            ({"trace_id": "1"}, "expected rating, edit or comment"),
            ({"trace_id": "1", "rating": "great"}, "rating is 'great'"),
        ):
            answer = client.post(f"{address}/feedback", json=body)
            assert answer.status_code == 400
            assert problem in answer.json()["error"]["message"]
        assert client.post(f"{address}/feedback", content=b"{").status_code == 400
        assert client.post(f"{address}/chat/completions", json={"model": "astuner"}).status_code == 400
        other = client.post(f"{address}/chat/completions", json={**question("?"), "model": "gpt"})
        assert other.status_code == 404
        assert client.get(f"{address}/nothing").status_code == 404
        foreign = client.post(f"{address}/feedback", json={}, headers={"host": "evil.example"})
        assert foreign.status_code == 403
        names = client.get(f"{address}/models").json()["data"]
        assert {model["id"] for model in names} == {"astuner", "scripted", "folder"}
    assert json.dumps((tmp_path / "traces.jsonl").read_text()) == '""'

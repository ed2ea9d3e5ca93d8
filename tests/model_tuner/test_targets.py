"""Frozen targets: the models that answer for them, and the calls that are recorded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.errors import WorkflowError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.model_tuner.tuner import ModelTuner
from tests.scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def make(tokenizer: Any, targets: Targets) -> ModelTuner:
    engine = ScriptedEngine(
        lambda prompt, params: tokenizer.encode("mine<|im_end|>", add_special_tokens=False), max_model_len=512
    )
    return ModelTuner(engine, ChatCodec(tokenizer, "qwen3"), CallSettings(), episode_id="e", targets=targets)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def endpoint() -> Iterator[SimpleNamespace]:
    """An OpenAI-compatible server that answers with a tool call and accepts a single API key."""
    app, requests = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        from fastapi.responses import JSONResponse

        if request.headers["authorization"] != "Bearer right":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        requests.append(json.loads(await request.body()))
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{a"}}
        message = {"role": "assistant", "content": "look:", "tool_calls": [call, broken]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1", requests=requests)
    server.should_exit = True
    thread.join()
    listening.close()


async def test_endpoint_answers_are_not_trained(tokenizer: Any, endpoint: SimpleNamespace):
    frozen = {"review": FrozenModel("big", endpoint.url, "right")}
    tuner = make(tokenizer, Targets(("default",), frozen))
    trained = await tuner.chat([user("hi")])
    critic = tuner.for_agent("critic", "review")
    answer = await critic.chat([user("hi"), trained.call.messages[-1], user("well?")], tools=TOOLS, max_tokens=9)
    assert answer.parsed.content == "look:\n{a"
    assert [(call.name, dict(call.arguments)) for call in answer.parsed.tool_calls] == [("add", {"a": 1})]
    (sent,) = endpoint.requests
    assert (sent["model"], sent["max_tokens"], len(sent["messages"]), sent["tools"]) == ("big", 9, 3, TOOLS)
    assert [call.trained for call in tuner.calls] == [True, False]
    recorded = tuner.calls[1]
    assert (recorded.agent_name, recorded.target_tag, recorded.prompt_ids) == ("critic", "review", ())
    assert recorded.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    samples = build_samples(tuner.calls)
    assert [span.call_id for sample in samples for span in sample.spans] == ["e/0"]
    assert certificate(tuner.calls, samples) == 1.0


async def test_error_names_the_endpoint_that_rejects_the_request(tokenizer: Any, endpoint: SimpleNamespace):
    tuner = make(tokenizer, Targets(("default",), {"review": FrozenModel("big", endpoint.url, "wrong")}))
    with pytest.raises(WorkflowError, match=r"frozen_models\.review \(big at http://127.*no such key"):
        await tuner.for_agent("critic", "review").chat([user("hi")])


@pytest.mark.parametrize("answer", ["a page", {"choices": []}, {"choices": [{"message": None}]}])
async def test_error_names_a_server_that_is_not_an_endpoint(tokenizer: Any, answer: Any):
    app = FastAPI()
    app.post("/v1/chat/completions")(lambda: answer)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    tuner = make(tokenizer, Targets(("default",), {"review": FrozenModel("big", url, "k")}))
    with pytest.raises(WorkflowError, match=r"frozen_models\.review .* did not answer as an OpenAI endpoint does"):
        await tuner.for_agent("critic", "review").chat([user("hi")])
    server.should_exit = True
    thread.join()
    listening.close()


async def test_endpoint_receives_the_workflows_arguments(tokenizer: Any, endpoint: SimpleNamespace):
    tuner = make(tokenizer, Targets(("default",), {"review": FrozenModel("big", endpoint.url, "right")}))
    critic = tuner.for_agent("critic", "review")
    await critic.chat([user("hi")], tools=TOOLS, tool_choice="none", temperature=0.25)
    (sent,) = endpoint.requests
    assert "tools" not in sent
    assert "tool_choice" not in sent
    assert sent["temperature"] == 0.25


@pytest.mark.parametrize("answer", ["text", None])
async def test_error_shows_a_wrong_answer_of_a_debug_model(tokenizer: Any, answer: Any):
    async def model(*args: Any, **kwargs: Any) -> Any:
        return answer

    tuner = make(tokenizer, Targets(("solve",)))
    with pytest.raises(WorkflowError, match=f"debug_model answered {answer!r}; expected AgentScope's ChatResponse"):
        await tuner.for_agent("b", "review", model).chat([user("hi")])


async def test_debug_model_answers_only_for_frozen_targets(tokenizer: Any):
    from agentscope.message import TextBlock, ToolUseBlock
    from agentscope.model import ChatResponse

    async def complete(messages: Any, tools: Any = None, tool_choice: Any = None) -> Any:
        return ChatResponse(content=[TextBlock(type="text", text=f"{len(messages)} heard")])

    async def streamed(messages: Any, tools: Any = None, tool_choice: Any = None) -> Any:
        async def parts() -> Any:
            yield ChatResponse(content=[TextBlock(type="text", text="so")])
            use = ToolUseBlock(type="tool_use", id="1", name="add", input={"a": 2})
            yield ChatResponse(content=[TextBlock(type="text", text="so be it"), use])

        return parts()

    tuner = make(tokenizer, Targets(("solve",)))
    assert (await tuner.for_agent("a", "solve", complete).chat([user("hi")])).parsed.content == "mine"
    response = await tuner.for_agent("b", "review", complete)([user("hi")])
    assert [block["text"] for block in response.content] == ["1 heard"]
    answer = await tuner.for_agent("b", "review", streamed).chat([user("hi")])
    assert (answer.parsed.content, answer.parsed.tool_calls[0].arguments) == ("so be it", {"a": 2})
    assert [(call.agent_name, call.trained) for call in tuner.calls] == [("a", True), ("b", False), ("b", False)]


async def test_frozen_target_can_use_the_model_in_training(tokenizer: Any):
    tuner = make(tokenizer, Targets(("solve",), {"review": FrozenModel()}))
    answer = await tuner.for_agent("b", "review").chat([user("hi")])
    assert (answer.parsed.content, answer.call.trained) == ("mine", False)
    assert answer.call.completion_ids
    assert build_samples(tuner.calls) == []


async def test_frozen_target_without_a_model_is_an_error(tokenizer: Any):
    tuner = make(tokenizer, Targets(("solve",)))
    with pytest.raises(WorkflowError, match=r"'review' is not among .*\(solve\).*frozen_models\.review.*debug_model"):
        await tuner.for_agent("b", "review").chat([user("hi")])
    with pytest.raises(WorkflowError, match=r"'sovle' is not .*did you mean 'solve'"):
        await tuner.for_agent("b", "sovle").chat([user("hi")])
    with pytest.raises(WorkflowError, match=r"'default' \(the default tag"):
        await tuner.chat([user("hi")])

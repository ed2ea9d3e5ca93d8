"""The official OpenAI client in this process: features of the client, errors, streams that are left, and threads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from astuner import ModelTuner, WorkflowTask
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.schema import Completion, Episode, SamplingParams, Task
from astuner.task_runner.runner import TaskRunner
from astuner.workflow import FunctionWorkflow
from tests.scripted_engine import ScriptedEngine

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
QUESTION: Any = [{"role": "user", "content": "What is 1 + 2?"}]


def make(
    tokenizer: Any,
    *answers: str,
    engine: type[ScriptedEngine] = ScriptedEngine,
    targets: Targets | None = None,
    **settings: Any,
) -> ModelTuner:
    left = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    scripted = engine(lambda prompt, params: left.pop(0), 4096)
    limits = {"max_model_len": 4096, "max_response_length": 4096, "madness_checklist": (), **settings}
    return ModelTuner(scripted, ChatCodec(tokenizer), CallSettings(**limits), episode_id="e", targets=targets)


async def test_no_socket_is_opened(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    client = make(tokenizer, "3<|im_end|>").as_raw_openai_sdk_client()

    def refuse(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    answer = await client.chat.completions.create(model="astuner", messages=QUESTION, logprobs=True)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("3", "stop")
    assert choice.logprobs is not None
    assert [token.logprob for token in choice.logprobs.content or ()] == [-0.5]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert [model.id async for model in client.models.list()] == ["astuner"]


async def test_helpers_of_the_client(tokenizer: Any):
    class Sum(BaseModel):
        value: int

    client = make(tokenizer, "3 is it<|im_end|>", '{"value": 3}<|im_end|>').as_oai_sdk_model()
    async with client.chat.completions.stream(model="astuner", messages=QUESTION) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == "3 is it"
    raw = await client.chat.completions.with_raw_response.create(model="astuner", messages=QUESTION)
    message = raw.parse().choices[0].message
    assert Sum.model_validate_json(message.content or "").value == 3


@pytest.mark.parametrize(
    ("parameters", "status", "code", "param"),
    [
        ({"model": "gpt-4o"}, 404, "model_not_found", "model"),
        ({"logit_bias": {"1": 2}}, 400, "unsupported_parameter", "logit_bias"),
        ({"temperature": 9.0}, 400, None, "temperature"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 5000}]}, 400, "context_length_exceeded", "messages"),
    ],
)
async def test_an_error_has_status_code_and_parameter(
    tokenizer: Any, parameters: Any, status: int, code: str | None, param: str
):
    tuner = make(tokenizer, "3<|im_end|>")
    client = tuner.as_raw_openai_sdk_client()
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "astuner", "messages": QUESTION, **parameters})
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, param)
    assert not tuner.calls


async def test_the_names_of_the_model_are_those_of_the_gateway(tokenizer: Any):
    gateway = Gateway(model_names=("my-model",))
    ids = tokenizer.encode("3<|im_end|>", add_special_tokens=False)
    tuner = ModelTuner(
        ScriptedEngine(lambda prompt, params: ids, 4096),
        ChatCodec(tokenizer),
        CallSettings(),
        episode_id="e",
        endpoints=gateway,
    )
    client = tuner.as_raw_openai_sdk_client()
    answer = await client.chat.completions.create(model="my-model", messages=QUESTION)
    assert answer.model == "my-model"
    assert [model.id async for model in client.models.list()] == ["astuner", "my-model"]


async def test_an_unknown_address_is_named(tokenizer: Any):
    client = make(tokenizer).as_raw_openai_sdk_client()
    with pytest.raises(openai.NotFoundError, match="has no POST /v1/embeddings; it has /v1/chat/completions"):
        await client.embeddings.create(model="astuner", input="text")


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_stream_that_is_left_is_cut(tokenizer: Any, leaves: bool):
    tuner = make(tokenizer, "one two three four five six seven eight nine<|im_end|>")
    client = tuner.as_raw_openai_sdk_client()
    async with await client.chat.completions.create(model="astuner", messages=QUESTION, stream=True) as stream:
        async for chunk in stream:
            if leaves and chunk.choices[0].delta.content:
                break
    (call,) = tuner.calls
    assert (call.cut, call.trained) == (leaves, not leaves)


class SlowEngine(ScriptedEngine):
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> Completion:
        await asyncio.sleep(30)
        return await super().generate(prompt_ids, params, **options)


async def test_the_time_limit_of_a_client_applies(tokenizer: Any):
    tuner = make(tokenizer, "3<|im_end|>", engine=SlowEngine)
    client = tuner.as_raw_openai_sdk_client().with_options(timeout=0.05, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="astuner", messages=QUESTION)
    assert not tuner.open_calls
    assert not [call for call in tuner.calls if call.trained]


async def test_the_blocking_client_works_on_and_off_the_event_loop(tokenizer: Any):
    tuner = make(tokenizer, *["3<|im_end|>"] * 9)
    client = tuner.as_raw_openai_sdk_client("solver", sync=True)

    def ask(number: int) -> str | None:
        messages: Any = [{"role": "user", "content": f"What is 1 + {number}?"}]
        return client.chat.completions.create(model="astuner", messages=messages).choices[0].message.content

    assert ask(0) == "3"
    assert await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(8))) == ["3"] * 8
    assert len({call.call_id for call in tuner.calls}) == 9
    assert {call.agent_name for call in tuner.calls} == {"solver"}
    assert next(iter(client.models.list())).id == "astuner"


def run_episode(tokenizer: Any, agent: Callable[[ModelTuner], Awaitable[Any]], **settings: Any) -> Episode:
    ids = tokenizer.encode("3<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, 4096)

    async def run(task: WorkflowTask, model_tuner: ModelTuner) -> float:
        await agent(model_tuner)
        return 1.0

    runner = TaskRunner(lambda: FunctionWorkflow(run), None, engine, ChatCodec(tokenizer), on_max_steps="fail")
    task = WorkflowTask(Task("t", "?"), "train-000001-t-0")
    return asyncio.run(runner.run(task, runner.tuner(task, CallSettings(**{"madness_checklist": (), **settings}))))


@pytest.mark.parametrize(
    ("messages", "settings", "kind"),
    [
        ([{"role": "user", "content": "long " * 99}], {"max_prompt_length": 50}, "context_length"),
        (QUESTION, {"max_calls": 1}, "max_steps"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "workflow"),
    ],
)
def test_an_episode_fails_for_the_reason_of_its_call(tokenizer: Any, messages: Any, settings: Any, kind: str):
    async def agent(model_tuner: ModelTuner) -> None:
        client = model_tuner.as_raw_openai_sdk_client()
        for _ in range(2):
            await client.chat.completions.create(model="astuner", messages=messages)

    episode = run_episode(tokenizer, agent, **settings)
    assert (episode.status, episode.error_kind) == ("failed", kind), episode.error


def test_tokens_of_untrained_agents_have_mask_0(tokenizer: Any):
    targets = Targets(("solver",), {"critic": FrozenModel()})
    tuner = make(tokenizer, "3<|im_end|>", "no<|im_end|>", targets=targets)

    async def talk() -> None:
        for name in ("solver", "critic"):
            client = tuner.as_raw_openai_sdk_client(name, name)
            await client.chat.completions.create(model="astuner", messages=QUESTION)

    asyncio.run(talk())
    assert [(call.agent_name, call.trained) for call in tuner.calls] == [("solver", True), ("critic", False)]


@pytest.mark.parametrize(
    ("strict", "arguments", "is_call"),
    [(True, '{"a": 1}', True), (True, '{"a": "x"}', False), (True, "{}", False), (False, '{"a": "x"}', True)],
)
async def test_a_strict_tool_gets_arguments_of_its_schema_only(
    tokenizer: Any, strict: bool, arguments: str, is_call: bool
):
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    tuner = make(tokenizer, text, text)
    client = tuner.as_raw_openai_sdk_client()
    tool: Any = {"type": "function", "function": {**ADD["function"], "strict": strict}}  # type: ignore[dict-item]
    answer = await client.chat.completions.create(model="astuner", messages=QUESTION, tools=[tool])
    message = answer.choices[0].message
    assert bool(message.tool_calls) == is_call
    assert is_call or arguments in (message.content or "")
    without: Any = [ADD]
    await client.chat.completions.create(model="astuner", messages=QUESTION, tools=without)
    first, second = tuner.calls
    assert first.prompt_ids == second.prompt_ids
    assert first.tools_hash == second.tools_hash

"""The official OpenAI client against the gateway: answers, streams, tools and their records."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from astuner.context_tracker.audit import certificate
from astuner.context_tracker.merge import build_samples
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.tuner import ModelTuner
from tests.gateway.conftest import MakeTuner

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
HI: list[Any] = [{"role": "user", "content": "hi"}]


def client(tuner: ModelTuner, **options: Any) -> OpenAI:
    base_url, api_key = tuner.as_oai_baseurl_apikey()
    return OpenAI(base_url=base_url, api_key=api_key, **{"max_retries": 0, **options})


def async_client(tuner: ModelTuner, **options: Any) -> AsyncOpenAI:
    endpoint = tuner.as_oai_baseurl_apikey(agent_name="solver")
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **{"max_retries": 0, **options})


def test_an_answer_is_recorded_with_its_tokens(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["hello<|im_end|>"])
    with gateway.episode(tuner), client(tuner) as openai_client:
        completion = openai_client.chat.completions.create(model="astuner", messages=HI)
    (call,) = tuner.calls
    assert completion.choices[0].message.content == "hello"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.id == f"chatcmpl-{call.call_id}"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(call.prompt_ids)
    assert completion.usage.completion_tokens == len(call.completion_ids)
    assert call.trained
    assert not call.cut


async def test_tool_turns_extend_the_sampled_tokens(gateway: Gateway, make_tuner: MakeTuner):
    for streamed in (False, True):
        tuner = make_tuner([CALL, "3<|im_end|>"])
        with gateway.episode(tuner):
            async with async_client(tuner) as openai_client:
                messages: list[Any] = [{"role": "user", "content": "1+2?"}]
                for _ in range(2):
                    if streamed:
                        async with openai_client.chat.completions.stream(
                            model="astuner", messages=messages, tools=TOOLS
                        ) as stream:
                            message = (await stream.get_final_completion()).choices[0].message
                    else:
                        completion = await openai_client.chat.completions.create(
                            model="astuner", messages=messages, tools=TOOLS
                        )
                        message = completion.choices[0].message
                    messages.append(message.to_dict())
                    for call in message.tool_calls or ():
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        first, second = tuner.calls
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        assert (
            second.prompt_ids[: len(first.prompt_ids + first.completion_ids)] == first.prompt_ids + first.completion_ids
        )
        assert second.fork is None
        assert {call.agent_name for call in tuner.calls} == {"solver"}
        samples = build_samples(tuner.calls)
        assert len(samples) == 1
        assert certificate(tuner.calls, samples) == 1.0


def test_the_finish_reason_of_a_cut_answer_is_length(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["one two three four five six<|im_end|>"])
    with gateway.episode(tuner), client(tuner) as openai_client:
        completion = openai_client.chat.completions.create(model="astuner", messages=HI, max_completion_tokens=2)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2


async def test_concurrent_calls_are_recorded_once_each(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([f"answer{number}<|im_end|>" for number in range(40)], max_calls=40)
    with gateway.episode(tuner):
        async with async_client(tuner) as openai_client:
            completions = await asyncio.gather(
                *(
                    openai_client.chat.completions.create(
                        model="astuner", messages=[{"role": "user", "content": f"question {number}"}]
                    )
                    for number in range(40)
                )
            )
    by_id = {f"chatcmpl-{call.call_id}": call for call in tuner.calls}
    assert len(by_id) == len(tuner.calls) == 40
    for number, completion in enumerate(completions):
        call = by_id[completion.id]
        assert call.messages[0]["content"] == f"question {number}"
        assert call.messages[-1]["content"] == completion.choices[0].message.content


def test_a_parameter_that_cannot_be_honoured_is_named(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    with gateway.episode(tuner), client(tuner) as openai_client:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as caught:
            openai_client.chat.completions.create(model="astuner", messages=HI, logit_bias={"3": 1})
        assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError, match="role"):
            openai_client.chat.completions.create(model="astuner", messages=[{"role": "robot", "content": "hi"}])  # type: ignore[list-item, misc]
    assert tuner.calls == ()


def test_limits_have_the_codes_of_a_real_server(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(max_prompt_length=20)
    with gateway.episode(tuner), client(tuner, max_retries=2) as openai_client:
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.chat.completions.create(model="astuner", messages=[{"role": "user", "content": "hi " * 100}])
        assert caught.value.code == "context_length_exceeded"
        openai_client.chat.completions.create(model="astuner", messages=HI)
    tuner = make_tuner(max_calls=1)
    with gateway.episode(tuner), client(tuner, max_retries=2) as openai_client:
        openai_client.chat.completions.create(model="astuner", messages=HI)
        with pytest.raises(openai.BadRequestError, match="max_steps") as caught:
            openai_client.chat.completions.create(model="astuner", messages=HI)
        assert caught.value.code == "max_steps_exceeded"
    assert len(tuner.calls) == 1
    assert tuner.call_limit_error is not None


def test_models_are_listed_and_other_names_rejected(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner()
    with gateway.episode(tuner), client(tuner) as openai_client:
        assert [model.id for model in openai_client.models.list()] == ["astuner"]
        with pytest.raises(openai.NotFoundError, match="gpt-4o") as caught:
            openai_client.chat.completions.create(model="gpt-4o", messages=HI)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            openai_client.embeddings.create(model="astuner", input="hi")
    assert tuner.calls == ()

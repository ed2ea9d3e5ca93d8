"""Anthropic's Messages API: conversion of requests and answers, errors, keys and parameters."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from astuner.errors import InvalidRequestError, UnsupportedParameterError
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.chat_options import SAMPLING_PARAMETERS
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.model_tuner.http_api.anthropic_messages import (
    parse_messages_request,
    to_messages_events,
    to_messages_response,
)
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import FinishReason, LlmCall
from tests.gateway.conftest import MakeTuner

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def answer(parsed: ParsedAnswer, end: FinishReason = "stop", stop_string: str | None = None) -> ChatAnswer:
    return ChatAnswer(parsed, LlmCall("e/0", "e", (1, 2, 3), (65, 0), (-0.1, -0.2), end), stop_string)


def request(**parameters: Any) -> dict[str, Any]:
    return {"model": "astuner", "max_tokens": 9, "messages": HI, **parameters}


def client(tuner: ModelTuner, **options: Any) -> Anthropic:
    endpoint = tuner.as_oai_baseurl_apikey()
    return Anthropic(
        **{"base_url": endpoint.anthropic_base_url, "api_key": endpoint.api_key, "max_retries": 0, **options}
    )


def test_a_request_is_converted():
    parsed = parse_messages_request(
        request(
            system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
            tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            stop_sequences=["END"],
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            stream=True,
            metadata={"user_id": "u"},
            thinking={"type": "adaptive"},
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "1+2?", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Add.", "signature": "s"},
                        {"type": "text", "text": "So: "},
                        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": "ü"}},
                        {"type": "tool_use", "id": "call_2", "name": "add", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "3", "is_error": False},
                        {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "4"}]},
                        {"type": "tool_result", "tool_use_id": "call_3"},
                        {"type": "text", "text": "Go on."},
                    ],
                },
            ],
        )
    )
    assert parsed.messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {
            "role": "assistant",
            "content": "So: ",
            "reasoning_content": "Add.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": "ü"}'}},
                {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "4"}]},
        {"role": "tool", "tool_call_id": "call_3", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ]
    assert parsed.tools == [
        {
            "type": "function",
            "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
        }
    ]
    arguments = parsed.chat_arguments()
    assert arguments["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert arguments["parallel_tool_calls"] is False
    names = (*SAMPLING_PARAMETERS, "max_tokens", "stop", "seed")
    assert {name: arguments[name] for name in names if arguments[name] is not None} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_tokens": 9,
        "stop": ("END",),
    }
    assert arguments["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}},
    }
    assert parsed.stream
    assert parsed.model == "astuner"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(None, None), ({"type": "auto"}, "auto"), ({"type": "none"}, "none"), ({"type": "any"}, "required")],
)
def test_tool_choice_has_openais_name(choice: Any, expected: Any):
    assert parse_messages_request(request(tools=[TOOL], tool_choice=choice)).chat_arguments()["tool_choice"] == expected


def assistant(*blocks: Any) -> dict[str, Any]:
    return request(messages=[*HI, {"role": "assistant", "content": list(blocks)}, *HI])


UNSUPPORTED = {
    "thinking": request(thinking={"type": "enabled", "budget_tokens": 1024}),
    "output_config.effort": request(output_config={"effort": "high"}),
    "mcp_servers": request(mcp_servers=[{}]),
    "container": request(container="c"),
    "tools": request(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
    "tools[0].defer_loading": request(tools=[{**TOOL, "defer_loading": True}]),
    "messages[0].content[0]": request(messages=[{"role": "user", "content": [IMAGE]}]),
    "messages[0].content[0].content[0]": request(
        messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]
    ),
    "messages[1].content[0]": assistant({"type": "redacted_thinking", "data": "x"}),
    "system[0]": request(system=[IMAGE]),
    "messages": request(messages=[*HI, {"role": "assistant", "content": "The answer is"}]),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_parameter_is_rejected_by_name(name: str):
    with pytest.raises(UnsupportedParameterError) as caught:
        parse_messages_request(UNSUPPORTED[name])
    assert caught.value.name == name
    assert name in str(caught.value)


INVALID = {
    "max_tokens": {"model": "astuner", "messages": HI},
    "messages": request(messages=[]),
    "messages[0].content": request(messages=[{"role": "user", "content": 3}]),
    "messages[0].content[0]": request(messages=[{"role": "user", "content": ["hi"]}]),
    "messages[0].content[0].text": request(messages=[{"role": "user", "content": [{"type": "text"}]}]),
    "messages[1].content[0].id": assistant({"type": "tool_use", "name": "add", "input": {}}),
    "messages[1].content[0].input": assistant({"type": "tool_use", "id": "c", "name": "add", "input": "{}"}),
    "tools": request(tools=[{"name": "add"}]),
    "tool_choice": request(tool_choice={"type": "any"}),
    "tool_choice.disable_parallel_tool_use": request(tool_choice={"type": "auto", "disable_parallel_tool_use": 1}),
    "stop": request(stop_sequences=[""]),
    "temperature": request(temperature="hot"),
    "stream": request(stream="yes"),
    "output_config.format": request(output_config={"format": {"type": "xml"}}),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_parameter_is_named(name: str):
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages_request(INVALID[name])
    assert caught.value.name == name


ANSWERS = {
    "text": answer(ParsedAnswer("three, and a text that is longer than one chunk")),
    "cut": answer(ParsedAnswer("thr"), "length"),
    "stopped": answer(ParsedAnswer("thr"), stop_string="ee"),
    "thinking": answer(ParsedAnswer("3", reasoning="1 and 2 are 3, without any doubt")),
    "only thinking": answer(ParsedAnswer("", reasoning="1 and"), "length"),
    "empty": answer(ParsedAnswer("")),
    "tools": answer(
        ParsedAnswer(
            "", (ToolCall("call_1", "add", {"a": 1.0, "b": "ü" * 30, "n": 10**30}), ToolCall("call_2", "add", {}))
        )
    ),
    "thinking, text and tools": answer(ParsedAnswer("so", (ToolCall("call_1", "add", {"a": 1}),), "hm")),
    "cut tools": answer(ParsedAnswer("so", (ToolCall("call_1", "add", {"a": 1}),)), "length"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_message(name: str):
    message = to_messages_response([ANSWERS[name]], "m")
    Message.model_validate(message)
    events = [event for _, event in to_messages_events([ANSWERS[name]], "m")]
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    streamed = events[0]["message"] | events[-2]["delta"] | {"usage": events[-2]["usage"], "content": []}
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed["content"])
            block, partial_json = dict(event["content_block"]), ""
        elif event["type"] == "content_block_stop":
            streamed["content"].append(block | ({"input": json.loads(partial_json)} if "input" in block else {}))
        elif event["delta"]["type"] == "input_json_delta":
            partial_json += event["delta"]["partial_json"]
        else:
            name = fields[event["delta"]["type"]]
            block[name] += event["delta"][name]
    assert streamed == message


def test_the_stop_reason_is_that_of_the_call():
    messages = {name: to_messages_response([one], "m") for name, one in ANSWERS.items()}
    assert {name: message["stop_reason"] for name, message in messages.items()} == {
        "text": "end_turn",
        "cut": "max_tokens",
        "stopped": "stop_sequence",
        "thinking": "end_turn",
        "only thinking": "max_tokens",
        "empty": "end_turn",
        "tools": "tool_use",
        "thinking, text and tools": "tool_use",
        "cut tools": "max_tokens",
    }
    kinds = {name: [block["type"] for block in message["content"]] for name, message in messages.items()}
    assert kinds["thinking, text and tools"] == ["thinking", "text", "tool_use"]
    assert kinds["tools"] == ["tool_use", "tool_use"]
    assert kinds["empty"] == ["text"]


@pytest.mark.parametrize("options", [{}, {"api_key": None}])
def test_both_headers_carry_the_key(gateway: Gateway, make_tuner: MakeTuner, options: dict[str, Any]):
    tuner = make_tuner()
    with gateway.episode(tuner):
        key = tuner.as_oai_baseurl_apikey().api_key
        with client(tuner, **options, auth_token=key if options else None) as anthropic_client:
            message = anthropic_client.messages.create(model="astuner", max_tokens=9, messages=HI)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hi", "citations": None}]
    assert message.id == "msg_e/0"
    assert len(tuner.calls) == 1


def test_errors_have_anthropics_format(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(max_prompt_length=80)
    with gateway.episode(tuner), client(tuner, api_key="sk-ant-forged") as anthropic_client:
        with pytest.raises(anthropic.AuthenticationError) as forged:
            anthropic_client.messages.create(**request())
        with pytest.raises(anthropic.AuthenticationError):
            anthropic_client.messages.count_tokens(model="astuner", messages=HI)
    assert forged.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with gateway.episode(tuner), client(tuner) as anthropic_client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            anthropic_client.messages.create(**request(thinking={"type": "disabled"}))
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert "thinking" in body["error"]["message"]
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):  # the engine cannot constrain
            anthropic_client.messages.create(
                **request(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
            )
        with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
            anthropic_client.messages.create(**request(stop_sequences=["a", "b", "c", "d", "e"]))
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            anthropic_client.messages.create(**request(messages=[{"role": "user", "content": "hi " * 100}]))
        with pytest.raises(anthropic.NotFoundError, match="claude-sonnet") as missing:
            anthropic_client.messages.create(**request(model="claude-sonnet"))
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert tuner.calls == ()


def test_the_tokens_of_a_prompt_are_counted_without_a_call(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["hello<|im_end|>"])
    with gateway.episode(tuner), client(tuner) as anthropic_client:
        tool = {**TOOL, "strict": True}
        options: Any = {"model": "astuner", "system": "Be brief.", "messages": HI, "tools": [tool]}
        count = anthropic_client.messages.count_tokens(**options).input_tokens
        assert tuner.calls == ()
        assert anthropic_client.messages.create(**options, max_tokens=9).usage.input_tokens == count
        with pytest.raises(anthropic.NotFoundError, match="claude-sonnet"):
            anthropic_client.messages.count_tokens(**options | {"model": "claude-sonnet"})


def test_arguments_that_other_languages_write_differently_are_recognised(gateway: Gateway, make_tuner: MakeTuner):
    """JavaScript has no integers, keeps 53 bits of a number, and writes 2.0 as 2."""
    arguments = '{"a": 2.0, "b": 12345678901234567890123, "c": 1e3, "d": "\\ud83d"}'
    tuner = make_tuner(
        [f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>', "done<|im_end|>"]
    )
    with gateway.episode(tuner):
        endpoint = tuner.as_oai_baseurl_apikey()
        conversation: list[Any] = [*HI]
        for _ in range(2):
            response = httpx.post(
                f"{endpoint.anthropic_base_url}/v1/messages",
                headers={"x-api-key": endpoint.api_key},
                content=json.dumps(request(messages=conversation, tools=[TOOL], max_tokens=256)),
            )
            content = response.raise_for_status().json()["content"]
            if content[0]["type"] == "tool_use":
                assert content[0]["input"] == json.loads(arguments)
                content[0]["input"] |= {"a": 2, "b": 1.2345678901234568e22, "c": 1000}
                result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "3"}
                conversation += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert [call.fork for call in tuner.calls] == [None, None]

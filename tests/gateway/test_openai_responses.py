"""OpenAI's Responses API: conversion of requests and answers, streams, stored responses and parameters."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from astuner.errors import InvalidRequestError, UnsupportedParameterError
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.chat_options import SAMPLING_PARAMETERS
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.model_tuner.http_api.openai_responses import parse_responses_request, to_response, to_response_events
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import FinishReason, LlmCall
from tests.gateway.conftest import MakeTuner

TOOL: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}


def answer(parsed: ParsedAnswer, end: FinishReason = "stop") -> ChatAnswer:
    return ChatAnswer(parsed, LlmCall("e/0", "e", (1, 2, 3), (65, 66, 0), (-0.1, -0.2, -0.3), end))


def client(tuner: ModelTuner) -> OpenAI:
    base_url, api_key = tuner.as_oai_baseurl_apikey()
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def test_a_request_is_converted():
    parsed = parse_responses_request(
        {
            "model": "astuner",
            "instructions": "Be brief.",
            "tools": [{**TOOL, "strict": True}],
            "tool_choice": {"type": "function", "name": "add"},
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 9,
            "top_logprobs": 2,
            "stream": True,
            "store": False,
            "truncation": "disabled",
            "background": False,
            "reasoning": {"effort": None, "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}},
            "metadata": {"user": "u"},
            "client_metadata": {"turn_id": "t"},
            "input": [
                {"role": "developer", "content": "Add."},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So: "}]},
                {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
                {"type": "function_call", "call_id": "call_2", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "3"},
                {
                    "type": "function_call_output",
                    "call_id": "call_2",
                    "output": [{"type": "input_text", "text": "4"}],
                },
                {"role": "assistant", "content": "3"},
                {"role": "assistant", "content": "and 4"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sum."}]},
                {"role": "user", "content": "Go on."},
            ],
        },
        (),
    )
    assert parsed.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "So: ",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": "4"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "and 4"},
        {"role": "assistant", "content": "", "reasoning_content": "Sum."},
        {"role": "user", "content": "Go on."},
    ]
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
    assert parsed.tools == [{"type": "function", "function": function}]
    arguments = parsed.chat_arguments()
    assert arguments["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert arguments["parallel_tool_calls"] is False
    names = (*SAMPLING_PARAMETERS, "max_tokens", "stop", "seed")
    assert {name: arguments[name] for name in names if arguments[name] is not None} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
    }
    assert arguments["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
    }
    assert (parsed.options.logprobs, parsed.options.top_logprobs, parsed.stream) == (True, 2, True)


UNSUPPORTED = {
    "background": {"background": True},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "c"},
    "prompt": {"prompt": {"id": "p"}},
    "max_tool_calls": {"max_tool_calls": 3},
    "context_management": {"context_management": [{"type": "compaction"}]},
    "reasoning.effort": {"reasoning": {"effort": "high"}},
    "reasoning.summary": {"reasoning": {"summary": "detailed"}},
    "text.verbosity": {"text": {"verbosity": "low"}},
    "include": {"include": ["file_search_call.results"]},
    "tools": {"tools": [{"type": "web_search"}]},
    "tools[0].defer_loading": {"tools": [{**TOOL, "defer_loading": True}]},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    "input[0].content[1]": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, IMAGE]}]
    },
    "input[0].output[0]": {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
    "input[0]": {"input": [{"type": "local_shell_call", "id": "l"}]},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_parameter_is_rejected_by_name(name: str):
    with pytest.raises(UnsupportedParameterError) as caught:
        parse_responses_request({"model": "astuner", "input": "hi", **UNSUPPORTED[name]}, ())
    assert caught.value.name == name
    assert name in str(caught.value)


INVALID = {
    "input": {"input": []},
    "input[0]": {"input": ["hi"]},
    "input[0].role": {"input": [{"role": "robot", "content": "hi"}]},
    "input[0].content": {"input": [{"role": "user", "content": None}]},
    "input[0].call_id": {"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]},
    "input[0].arguments": {"input": [{"type": "function_call", "name": "add", "call_id": "c", "arguments": {}}]},
    "input[0].encrypted_content": {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
    "instructions": {"instructions": ["Be brief."]},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "include": {"include": "logprobs"},
    "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}},
    "text": {"text": "json"},
    "reasoning": {"reasoning": "high"},
    "top_p": {"top_p": 2},
    "stream": {"stream": "yes"},
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_parameter_is_named(name: str):
    with pytest.raises(InvalidRequestError) as caught:
        parse_responses_request({"model": "astuner", "input": "hi", **INVALID[name]}, ())
    assert caught.value.name == name


ANSWERS = {
    "text": answer(ParsedAnswer("three, and a text that is longer than one chunk")),
    "cut": answer(ParsedAnswer("thr"), "length"),
    "thinking": answer(ParsedAnswer("3", reasoning="1 and 2 are 3, without any doubt")),
    "only thinking": answer(ParsedAnswer("", reasoning="1 and"), "length"),
    "empty": answer(ParsedAnswer("")),
    "tools": answer(
        ParsedAnswer("", (ToolCall("call_1", "add", {"a": 1, "b": "ü" * 30}), ToolCall("call_2", "add", {})))
    ),
    "thinking, text and tools": answer(ParsedAnswer("so", (ToolCall("call_1", "add", {"a": 1}),), "hm")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_response(name: str):
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    request = parse_responses_request({"model": "m", "input": "hi", "include": include}, ())
    response = to_response([ANSWERS[name]], request, "m", chr)
    Response.model_validate(response)
    events = [event for _, event in to_response_events([ANSWERS[name]], request, "m", chr)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert events[-1]["response"] == response
    assert events[0]["response"]["output"] == []
    done, item, text = [], {}, ""
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(done)
            assert event["item"]["status"] == "in_progress"
            item, text = event["item"], ""
            continue
        if event["type"] == "response.output_item.done":
            done.append(event["item"])
            continue
        assert event["item_id"] == item["id"]
        if event["type"].endswith(".delta"):
            text += event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == text
        elif event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == text
        elif event["type"] == "response.content_part.done":
            assert event["part"]["text"] == text
        else:
            assert event["type"] == "response.content_part.added"
            assert event["part"]["text"] == ""
    assert done == response["output"]


def test_the_status_and_the_items_are_those_of_the_answer():
    request = parse_responses_request({"model": "m", "input": "hi", "max_output_tokens": 9}, ())
    responses = {name: to_response([one], request, "m", chr) for name, one in ANSWERS.items()}
    assert {name: [item["type"] for item in response["output"]] for name, response in responses.items()} == {
        "text": ["message"],
        "cut": ["message"],
        "thinking": ["reasoning", "message"],
        "only thinking": ["reasoning", "message"],
        "empty": ["message"],
        "tools": ["function_call", "function_call"],
        "thinking, text and tools": ["reasoning", "message", "function_call"],
    }
    for name, response in responses.items():
        is_cut = name in ("cut", "only thinking")
        assert response["status"] == response["output"][-1]["status"] == ("incomplete" if is_cut else "completed")
        assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
        assert response["usage"]["total_tokens"] == 6
        assert response["max_output_tokens"] == 9
        assert "encrypted_content" not in response["output"][0]


def test_reasoning_that_clients_only_return_encrypted_is_read(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([f"<think>\nHm, ü.\n</think>\n\n{CALL}", "3<|im_end|>"])
    with gateway.episode(tuner), client(tuner) as openai_client:
        options: Any = {"model": "astuner", "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
        first: Any = openai_client.responses.create(**options, input="1+2?")
        reasoning, call = [item.to_dict() for item in first.output]
        assert reasoning.pop("content") == [{"type": "reasoning_text", "text": "Hm, ü."}]
        assert reasoning["encrypted_content"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
        items: Any = [{"role": "user", "content": "1+2?"}, reasoning, call, output]
        openai_client.responses.create(**options, input=items)
    assert tuner.calls[1].fork is None
    assert tuner.calls[1].messages[1]["reasoning_content"] == "Hm, ü."


def test_an_earlier_response_is_continued_without_its_instructions(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner([f"{number}<|im_end|>" for number in range(4)])
    with gateway.episode(tuner), client(tuner) as openai_client:
        first = openai_client.responses.create(model="astuner", input="a", instructions="Be brief.", store=False)
        options: Any = {"model": "astuner", "previous_response_id": first.id}
        second = openai_client.responses.create(**options, input="b")
        openai_client.responses.create(**options, input="c", instructions="Be long.")
        openai_client.responses.create(model="astuner", previous_response_id=second.id, input=[])
        with pytest.raises(openai.BadRequestError, match="not a response of this episode") as caught:
            openai_client.responses.create(model="astuner", previous_response_id="resp_x/0", input="d")
        assert caught.value.param == "previous_response_id"
    conversations = [[message["content"] for message in call.messages] for call in tuner.calls]
    assert conversations == [
        ["Be brief.", "a", "0"],
        ["a", "0", "b", "1"],
        ["Be long.", "a", "0", "c", "2"],
        ["a", "0", "b", "1", "3"],
    ]
    assert second.previous_response_id == first.id
    other = make_tuner(episode_id="f")
    with gateway.episode(other), client(other) as openai_client, pytest.raises(openai.BadRequestError):
        openai_client.responses.create(**options, input="b")


def test_errors_name_the_parameters_of_this_api(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(max_prompt_length=80)
    with gateway.episode(tuner), client(tuner) as openai_client:
        schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
        for name, parameters in {
            "text.format": {"text": {"format": schema}},  # the engine of the test cannot constrain
            "input": {"input": "hi " * 100},
            "max_output_tokens": {"max_output_tokens": 0},
        }.items():
            with pytest.raises(openai.BadRequestError, match=name) as caught:
                openai_client.responses.create(**{"model": "astuner", "input": "hi", **parameters})  # type: ignore[call-overload]
            assert caught.value.param == name
            assert caught.value.code == ("context_length_exceeded" if name == "input" else caught.value.code)
    assert tuner.calls == ()


def test_logprobs_are_in_the_text(gateway: Gateway, make_tuner: MakeTuner):
    tuner = make_tuner(["hi<|im_end|>"])
    with gateway.episode(tuner), client(tuner) as openai_client:
        response: Any = openai_client.responses.create(
            model="astuner", input="hi", include=["message.output_text.logprobs"]
        )
    logprobs = response.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs) == "hi"
    assert [token.logprob for token in logprobs] == list(tuner.calls[0].logprobs[:-1])

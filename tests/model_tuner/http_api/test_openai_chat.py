"""Requests and answers in OpenAI's format, read by the types of the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from astuner.errors import InvalidRequestError, UnsupportedParameterError
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.codec import ParsedAnswer, ToolCall
from astuner.model_tuner.http_api.openai_completions import parse_chat_request, to_chat_completion, to_chunks
from astuner.schema import FinishReason, LlmCall

MESSAGES = [{"role": "user", "content": "1+2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def answer(parsed: ParsedAnswer, finish_reason: FinishReason = "stop") -> ChatAnswer:
    call = LlmCall("e/0", "e", (1, 2, 3), (65, 66, 0), (-0.1, -0.2, -0.3), finish_reason)
    top = (((65, -0.1), (66, -2.5)),) * 3
    return ChatAnswer(parsed, call, text_tokens=2 if finish_reason == "stop" else 3, top_logprobs=top)


ANSWERS = {
    "text": answer(ParsedAnswer("three, and a text that is longer than one chunk")),
    "cut": answer(ParsedAnswer("thr"), "length"),
    "thinking": answer(ParsedAnswer("3", reasoning="1 and 2 are 3, without any doubt")),
    "tools": answer(
        ParsedAnswer("", (ToolCall("call_1", "add", {"a": 1, "b": "ü" * 30}), ToolCall("call_2", "add", {})))
    ),
    "cut tools": answer(ParsedAnswer("so", (ToolCall("call_1", "add", {"a": 1}),)), "length"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_completion(name: str):
    request = parse_chat_request(
        {
            "messages": MESSAGES,
            "stream": True,
            "logprobs": True,
            "stream_options": {"include_usage": True},
        }
    )
    completion = ChatCompletion.model_validate(to_chat_completion([ANSWERS[name]], request, "m", chr))
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for _, chunk in to_chunks([ANSWERS[name]], request, "m", chr):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    streamed = state.current_completion_snapshot
    (choice,), (whole,) = streamed.choices, completion.choices
    assert streamed.id == completion.id == "chatcmpl-e/0"
    assert choice.finish_reason == whole.finish_reason
    assert (choice.message.content or None) == (whole.message.content or None)
    calls, whole_calls = choice.message.tool_calls or [], whole.message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        (call.id, call.function.name, call.function.arguments) for call in whole_calls if call.type == "function"
    ]
    assert streamed.usage is not None
    assert completion.usage is not None
    assert streamed.usage.to_dict() == completion.usage.to_dict()
    assert choice.logprobs is not None
    assert whole.logprobs is not None
    assert choice.logprobs.to_dict() == whole.logprobs.to_dict()


def test_the_finish_reason_is_that_of_the_call():
    request = parse_chat_request({"messages": MESSAGES})
    reasons = {
        name: to_chat_completion([one], request, "m", chr)["choices"][0]["finish_reason"]
        for name, one in ANSWERS.items()
    }
    assert reasons == {
        "text": "stop",
        "cut": "length",
        "thinking": "stop",
        "tools": "tool_calls",
        "cut tools": "length",
    }


def test_logprobs_leave_out_the_end_token_and_usage_counts_it():
    request = parse_chat_request({"messages": MESSAGES, "logprobs": True})
    completion = to_chat_completion([ANSWERS["text"]], request, "m", chr)
    content = completion["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [("A", -0.1), ("B", -0.2)]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["A", "B"]
    assert content[1]["top_logprobs"][1] == {"token": "B", "logprob": -2.5, "bytes": [66]}
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    cut = to_chat_completion([ANSWERS["cut"]], request, "m", chr)["choices"][0]["logprobs"]["content"]
    assert len(cut) == 3


def test_several_answers_are_choices_of_one_completion():
    request = parse_chat_request({"messages": MESSAGES, "n": 2})
    completion = to_chat_completion([ANSWERS["text"], ANSWERS["cut"]], request, "m", chr)
    assert [choice["index"] for choice in completion["choices"]] == [0, 1]
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


def test_a_request_keeps_its_parameters():
    request = parse_chat_request(
        {
            "model": "astuner",
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 0,
            "max_completion_tokens": 7,
            "stop": "END",
            "seed": 3,
            "presence_penalty": None,
            "frequency_penalty": 0.5,
            "user": "someone",
            "store": True,
            "modalities": ["text"],
            "response_format": {"type": "text"},
        }
    )
    arguments = {name: value for name, value in request.chat_arguments().items() if value is not None}
    assert arguments == {
        "messages": MESSAGES,
        "tools": request.tools,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": -1,
        "max_tokens": 7,
        "stop": ("END",),
        "seed": 3,
        "frequency_penalty": 0.5,
        "n": 1,
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages", {}),
        ("model", {"model": 3}),
        ("temperature", {"temperature": 2.1}),
        ("temperature", {"temperature": 10**400}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": True}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0}),
        ("top_k", {"top_k": -2}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": 3}),
        ("seed", {"seed": 1.5}),
        ("n", {"n": 0}),
        ("n", {"n": 10**9}),
        ("logprobs", {"logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
        ("tools", {"tools": "add"}),
        ("tools", {"tools": [{"type": "function", "function": {}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "sometimes", "tools": [TOOL]}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]}),
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options", {"stream": True, "stream_options": {"usage": True}}),
        ("temprature", {"temprature": 1}),
    ],
)
def test_an_invalid_parameter_is_named(name: str, body: dict[str, Any]):
    with pytest.raises(InvalidRequestError, match=name) as caught:
        parse_chat_request({"messages": MESSAGES, **body} if "messages" not in body and body else body)
    assert caught.value.name == name
    assert not isinstance(caught.value, UnsupportedParameterError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"50": 3}),
        ("reasoning_effort", "high"),
        ("functions", [{"name": "add"}]),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("tools", [{"type": "web_search"}]),
        ("modalities", ["text", "audio"]),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_named(name: str, value: Any):
    with pytest.raises(UnsupportedParameterError, match=name) as caught:
        parse_chat_request({"messages": MESSAGES, name: value})
    assert caught.value.name == name


def test_a_body_must_be_an_object():
    with pytest.raises(InvalidRequestError, match="JSON object"):
        parse_chat_request([1])

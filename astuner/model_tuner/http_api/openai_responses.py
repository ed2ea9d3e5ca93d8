"""OpenAI's Responses API: requests, answers and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.model_tuner.answers import ChatAnswer, as_message
from astuner.model_tuner.http_api.api_errors import ApiError
from astuner.model_tuner.http_api.openai_completions import (
    ChatRequest,
    DecodeToken,
    given_parameters,
    parse_chat_request,
    pieces,
    to_logprobs,
    to_usage,
)
from astuner.model_tuner.http_api.responses_input import input_messages, output_items, response_id
from astuner.schema import LlmCall

# These parameters store or identify the request, and do not change an answer.
_WITHOUT_EFFECT = {
    *("metadata", "store", "user", "service_tier", "safety_identifier", "stream_options"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "client_metadata"),
}
_PARAMETERS = _WITHOUT_EFFECT | {
    *("model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls"),
    *("temperature", "top_p", "max_output_tokens", "top_logprobs", "text", "stream", "include", "reasoning"),
}
# Other parameters of the API, with the values that have no effect.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",)}
_REASONING_CONTENT, _TEXT_LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_PARAMETER_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}
"""The parameters of this API by their names in chat completions."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest(ChatRequest):
    """A request to the Responses API; `given` has the parameters of its body that are not null."""

    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encrypts_reasoning(self) -> bool:
        """Whether the answer contains reasoning in the form that clients send back."""
        return _REASONING_CONTENT in self.given.get("include", ())


def parse_responses_request(body: object, calls: Sequence[LlmCall]) -> ResponsesRequest:
    """Return the request in a `/v1/responses` body.

    A parameter that is null counts as absent. `metadata`, `store`, `user`, `service_tier`, `safety_identifier`,
    `stream_options`, `client_metadata` and the parameters of the prompt cache have no effect on an answer.

    Args:
        body: the JSON object of the request.
        calls: the finished calls of the episode.
    """
    given = given_parameters(body)
    for name, value in given.items():
        if name not in _PARAMETERS and value not in _NEUTRAL_VALUES.get(name, ()):
            raise UnsupportedParameterError(
                f"the model in training cannot honour {short_repr(name)}={short_repr(value)}; leave it out", str(name)
            )
    _reject_options("reasoning", given.get("reasoning"), {"summary": ("auto",), "generate_summary": ("auto",)})
    include = _includes(given.get("include", []))
    translated = {
        "messages": input_messages(given, calls),
        "tools": _tools(given.get("tools")),
        "tool_choice": _tool_choice(given.get("tool_choice")),
        "response_format": _response_format(given.get("text")),
        "max_tokens": given.get("max_output_tokens"),
        "logprobs": _TEXT_LOGPROBS in include or bool(given.get("top_logprobs")),
    }
    same = ("model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream")
    request = parse_chat_request(translated | {name: given[name] for name in same if name in given})
    return ResponsesRequest(**{one.name: getattr(request, one.name) for one in fields(request)}, given=given)


def to_response(
    answers: Sequence[ChatAnswer], request: ResponsesRequest, model: str, decode_token: DecodeToken
) -> dict[str, Any]:
    """Return an answer as a `response`.

    Args:
        decode_token: returns the text of a token, for logprobs.
    """
    (answer,) = answers
    usage = to_usage(answers)
    is_cut = answer.call.finish_reason == "length"
    items = output_items(as_message(answer.parsed), answer.call.call_id, encrypt_reasoning=request.encrypts_reasoning)
    for item in items:
        if item["type"] == "message" and request.options.logprobs:
            item["content"][0]["logprobs"] = to_logprobs(answer, decode_token)["content"]
    if is_cut:
        items[-1]["status"] = "incomplete"
    return _head(answer, request, model) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def to_response_events(
    answers: Sequence[ChatAnswer], request: ResponsesRequest, model: str, decode_token: DecodeToken
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a streamed answer's events, with names and data; for the arguments, see `to_response`."""
    response = to_response(answers, request, model, decode_token)
    start = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    kinds = ("response.created", "response.in_progress")
    events: list[dict[str, Any]] = [{"type": kind, "response": start} for kind in kinds]
    for index, item in enumerate(response["output"]):
        place: dict[str, Any] = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = item | empty | {"status": "in_progress"}
        events.append({"type": "response.output_item.added", **place, "item": added})
        events += [event | place | {"item_id": item["id"]} for event in _item_events(item)]
        events.append({"type": "response.output_item.done", **place, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield event["type"], event | {"sequence_number": number}


def to_responses_error(error: ApiError) -> ApiError:
    """Return an error with the name that the parameter has in this API."""
    name = _PARAMETER_NAMES.get(error.param or "")
    if name is None:
        return error
    message = error.message if name in error.message else f"{name}: {error.message}"
    return replace(error, param=name, message=message)


def _reject_options(name: str, options: object, neutral: Mapping[str, Sequence[Any]]) -> None:
    """Check a parameter with options, none of which can be honoured except for the neutral values."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise InvalidRequestError(f"{name} must be an object, got {short_repr(options)}", name)
    for option, value in options.items():
        if value is not None and value not in neutral.get(option, ()):
            raise UnsupportedParameterError(
                f"the model in training cannot honour {name}.{option}={short_repr(value)}; leave it out",
                f"{name}.{option}",
            )


def _includes(include: object) -> Sequence[Any]:
    if not isinstance(include, list):
        raise InvalidRequestError(f"include must be a list, got {short_repr(include)}", "include")
    for name in include:
        if name not in (_REASONING_CONTENT, _TEXT_LOGPROBS):
            raise UnsupportedParameterError(
                f"an answer of the model in training cannot include {short_repr(name)}; it can include "
                f"{_REASONING_CONTENT} and {_TEXT_LOGPROBS}",
                "include",
            )
    return include


def _tools(tools: object) -> object:
    """Return the tools in the format of chat completions. `parse_chat_request` rejects tools that are not functions."""
    if not isinstance(tools, list):
        return tools
    result = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            result.append(tool)
            continue
        where = f"tools[{index}]"
        unknown = {name: value for name, value in tool.items() if name not in ("type", *_TOOL_FIELDS)}
        _reject_options(where, unknown, {"defer_loading": (False,), "allowed_callers": (["direct"],)})
        function = {name: tool[name] for name in _TOOL_FIELDS if tool.get(name) is not None}
        result.append({"type": "function", "function": function})
    return result


def _tool_choice(choice: object) -> object:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, Mapping):
        raise UnsupportedParameterError(
            f"tool_choice={short_repr(choice)} cannot be honoured; send auto, none, required or "
            "{'type': 'function', 'name': …}",
            "tool_choice",
        )
    return choice


def _response_format(text: object) -> object:
    if text is None:
        return None
    form = text.get("format") if isinstance(text, Mapping) else None
    others = {name: value for name, value in text.items() if name != "format"} if isinstance(text, Mapping) else text
    _reject_options("text", others, {})
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    return form


def _head(answer: ChatAnswer, request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the fields of a response that do not depend on its output."""
    given, call = request.given, answer.call
    echoed = ("instructions", "previous_response_id", "max_output_tokens", "metadata", "user", "safety_identifier")
    return {name: given.get(name) for name in (*echoed, "prompt_cache_key", "service_tier")} | {
        "id": response_id(call.call_id, has_instructions="instructions" in given),
        "object": "response",
        "created_at": int(call.end_time),
        "model": model,
        "error": None,
        "metadata": given.get("metadata", {}),
        "background": False,
        "max_tool_calls": None,
        "parallel_tool_calls": request.options.parallel_tool_calls,
        "reasoning": {"effort": None, "summary": None},
        "store": given.get("store", True),
        "temperature": call.sampling.temperature,
        "text": given.get("text", {"format": {"type": "text"}}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": request.options.top_logprobs,
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
    }


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events between the start and the end of an item, without its id and its index."""
    if item["type"] == "function_call":
        kind = "response.function_call_arguments"
        for piece in pieces(item["arguments"]):
            yield {"type": f"{kind}.delta", "delta": piece}
        yield {"type": f"{kind}.done", "name": item["name"], "arguments": item["arguments"]}
        return
    (part,) = item["content"]
    kind = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
    started = part | {"text": ""} | {name: [] for name in logprobs}
    yield {"type": "response.content_part.added", "content_index": 0, "part": started}
    for piece in pieces(part["text"]):
        # A text's piece need not consist of whole tokens, so all logprobs come at the end.
        delta = {"type": f"{kind}.delta", "content_index": 0, "delta": piece}
        yield delta | {name: [] for name in logprobs}
    yield {"type": f"{kind}.done", "content_index": 0, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", "content_index": 0, "part": part}

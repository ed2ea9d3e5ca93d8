"""Anthropic's Messages API: requests, answers, streams and errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.model_tuner.answers import ChatAnswer
from astuner.model_tuner.http_api.api_errors import ApiError
from astuner.model_tuner.http_api.openai_completions import (
    ChatRequest,
    given_parameters,
    parse_chat_request,
    pieces,
    read_text,
)

# These parameters describe the request or its price, and do not change an answer.
_WITHOUT_EFFECT = frozenset(("metadata", "service_tier", "cache_control"))
_PARAMETERS = _WITHOUT_EFFECT | {
    *("model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k", "stream"),
    *("tools", "tool_choice", "thinking", "output_config"),
}
_TOOL_FIELDS = frozenset(("type", "name", "description", "input_schema", "strict"))
# Fields of a tool, with the values that have no effect.
_NEUTRAL_TOOL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
# These fields of a tool say how the answer is sent or cached.
_TOOL_FIELDS_WITHOUT_EFFECT = frozenset(("cache_control", "eager_input_streaming"))
_PARAMETER_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
}
"""The parameters of this API by their names in chat completions."""

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def parse_messages_request(body: object) -> ChatRequest:
    """Return the request in a `/v1/messages` body.

    A parameter that is null counts as absent. `metadata`, `service_tier` and `cache_control` have no effect.
    """
    given = _given(body)
    if "max_tokens" not in given:
        raise InvalidRequestError("max_tokens is required", "max_tokens")
    return _parse(given)


def parse_count_request(body: object) -> ChatRequest:
    """Return the request in a `/v1/messages/count_tokens` body."""
    return _parse(_given(body))


def to_messages_response(answers: Sequence[ChatAnswer], model: str) -> dict[str, Any]:
    """Return an answer as a `message`."""
    return _head(answers[0], model) | {
        "content": _blocks(answers[0]),
        "stop_reason": _stop_reason(answers[0]),
        "stop_sequence": answers[0].stop_string,
        "usage": _usage(answers[0]),
    }


def to_messages_events(answers: Sequence[ChatAnswer], model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the data of a streamed answer's events; the arguments are those for the response."""
    (answer,) = answers
    usage = _usage(answer)
    start = _head(answer, model) | {"content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": start | {"usage": usage | {"output_tokens": 0}}},
        {"type": "ping"},
    ]
    for index, block in enumerate(_blocks(answer)):
        empty, deltas = _deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events.extend({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        events.append({"type": "content_block_stop", "index": index})
    end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
    events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]
    for event in events:
        yield event["type"], event


def to_messages_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error. Its text names the parameter, because this API has no field for the name."""
    name = _PARAMETER_NAMES.get(error.param or "", error.param or "")
    message = error.message if name in error.message else f"{name}: {error.message}"
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {error.message}"  # agents recognise Anthropic's text
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, "api_error"), "message": message}}


def _given(body: object) -> dict[str, Any]:
    """Return the parameters of a body that are not null."""
    given = given_parameters(body)
    for name in given:
        if name not in _PARAMETERS:
            raise UnsupportedParameterError(
                f"the model in training has no parameter {short_repr(name)}; leave it out", str(name)
            )
    return given


def _parse(given: Mapping[str, Any]) -> ChatRequest:
    thinking = given.get("thinking")
    if thinking is not None and not (isinstance(thinking, Mapping) and thinking.get("type") == "adaptive"):
        raise UnsupportedParameterError(
            f"thinking={short_repr(thinking)} cannot be honoured: model.renderer decides for the whole run whether the "
            "model in training thinks. Leave it out, or send {'type': 'adaptive'}",
            "thinking",
        )
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(
            f"messages must be a list of at least one message, got {short_repr(messages)}", "messages"
        )
    conversation = []
    if given.get("system"):
        conversation.append({"role": "system", "content": _text_parts(given["system"], "system")})
    for index, message in enumerate(messages):
        conversation += _messages_of(message, f"messages[{index}]")
    if conversation[-1]["role"] == "assistant":
        raise UnsupportedParameterError(
            "messages ends with an assistant message, which the model in training cannot continue; end with a user "
            "message",
            "messages",
        )
    choice, parallel = _tool_choice(given.get("tool_choice"))
    tools = given.get("tools")
    if not isinstance(tools, list | None):
        raise InvalidRequestError(f"tools must be a list, got {short_repr(tools)}", "tools")
    translated = {
        "messages": conversation,
        "tools": None if tools is None else [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "stop": given.get("stop_sequences"),
        "response_format": _response_format(given.get("output_config")),
    }
    same = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
    return parse_chat_request(translated | {name: given[name] for name in same if name in given})


def _response_format(config: object) -> dict[str, Any] | None:
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise InvalidRequestError(f"output_config must be an object, got {short_repr(config)}", "output_config")
    for name, value in config.items():
        if name != "format" and value is not None:
            raise UnsupportedParameterError(
                f"the model in training cannot honour output_config.{name}; leave it out", f"output_config.{name}"
            )
    form = config.get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise InvalidRequestError(
            f"output_config.format.type must be json_schema, got {short_repr(form)}", "output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}


def _tool_choice(choice: object) -> tuple[str | dict[str, Any] | None, bool]:
    """Return the choice in OpenAI's format, and whether an answer may have several tool calls."""
    if choice is None:
        return None, True
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in ("auto", "any", "tool", "none"):
        raise InvalidRequestError(
            f"tool_choice.type must be auto, any, tool or none, got {short_repr(choice)}", "tool_choice"
        )
    single = choice.get("disable_parallel_tool_use") or False
    if not isinstance(single, bool):
        name = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequestError(f"{name} must be true or false, got {short_repr(single)}", name)
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise InvalidRequestError(f"tool_choice needs the name of a tool, got {short_repr(choice)}", "tool_choice")
        return {"type": "function", "function": {"name": choice["name"]}}, not single
    return "required" if kind == "any" else kind, not single


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise InvalidRequestError(f"{where} must be an object with a name, got {short_repr(tool)}", "tools")
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedParameterError(
            f"{where} has the type {short_repr(tool['type'])}; the model in training has only tools that the client "
            "runs, of the type 'custom'",
            "tools",
        )
    for name, value in tool.items():
        if value is None or name in _TOOL_FIELDS | _TOOL_FIELDS_WITHOUT_EFFECT:
            continue
        if value not in _NEUTRAL_TOOL_FIELDS.get(name, ()):
            raise UnsupportedParameterError(
                f"the model in training cannot honour {where}.{name}; leave it out", f"{where}.{name}"
            )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise InvalidRequestError(
            f"{where}.input_schema must be a JSON schema, got {short_repr(tool.get('input_schema'))}", "tools"
        )
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _messages_of(message: object, where: str) -> list[dict[str, Any]]:
    """Return a message as messages in OpenAI's format: several if it has results of tools."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"{where} must be an object with the role user, assistant or system, got {short_repr(message)}", "messages"
        )
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{where}.content must be a text or a list of blocks, got {short_repr(content)}", f"{where}.content"
        )
    if message["role"] == "assistant":
        return [_assistant_message(content, f"{where}.content")]
    if message["role"] == "system":
        return [{"role": "system", "content": _text_parts(content, f"{where}.content")}]
    return _user_messages(content, f"{where}.content")


def _assistant_message(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = _block_type(block, place)
        if kind == "text":
            texts.append(read_text(block, "text", place))
        elif kind == "thinking":
            thoughts.append(read_text(block, "thinking", place))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise InvalidRequestError(
                    f"{place}.input must be an object, got {short_repr(arguments)}", f"{place}.input"
                )
            function = {
                "name": read_text(block, "name", place),
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
            calls.append({"id": read_text(block, "id", place), "type": "function", "function": function})
        else:
            raise _unsupported_block(kind, place, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user_messages(blocks: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Return the results of tools, and then the text."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = _block_type(block, place)
        if kind == "tool_result":
            if parts:
                raise InvalidRequestError(
                    f"{place} is a tool_result after a text; put the results of tools first", "messages"
                )
            # `is_error` has no counterpart in chat templates; the text of the result says what happened.
            content = block.get("content")
            text = "" if content is None else _text_parts(content, f"{place}.content")
            results.append({"role": "tool", "tool_call_id": read_text(block, "tool_use_id", place), "content": text})
        elif kind == "text":
            parts.append({"type": "text", "text": read_text(block, "text", place)})
        else:
            raise _unsupported_block(kind, place, "text and tool_result")
    return results + ([{"role": "user", "content": parts}] if parts or not results else [])


def _text_parts(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return text, or blocks of text as parts in OpenAI's format."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a text or a list of blocks, got {short_repr(content)}", where)
    parts = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = _block_type(block, place)
        if kind != "text":
            raise _unsupported_block(kind, place, "text")
        parts.append({"type": "text", "text": read_text(block, "text", place)})
    return parts


def _block_type(block: object, where: str) -> str:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise InvalidRequestError(f"{where} must be a block with a type, got {short_repr(block)}", where)
    return str(block["type"])


def _unsupported_block(kind: str, where: str, supported: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"{where} is a block of the type {short_repr(kind)}; the model in training reads only {supported} there", where
    )


def _head(answer: ChatAnswer, model: str) -> dict[str, Any]:
    return {"id": f"msg_{answer.call.call_id}", "type": "message", "role": "assistant", "model": model}


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Return the content of an answer. An answer without text and tool calls has an empty text."""
    parsed = answer.parsed
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning:
        # Clients drop thinking without a signature. A hash is enough, because the thinking is not hidden.
        signature = hashlib.blake2b(parsed.reasoning.encode("utf-8", "replace"), digest_size=16).hexdigest()
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": signature})
    if parsed.content or not parsed.tool_calls:
        blocks.append({"type": "text", "text": parsed.content, "citations": None})
    for call in parsed.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an empty block and the deltas that fill it."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    texts = ["", *pieces(arguments)]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text} for text in texts]


def _stop_reason(answer: ChatAnswer) -> str:
    if answer.call.finish_reason == "length":
        return "max_tokens"
    if answer.parsed.tool_calls:
        return "tool_use"
    return "end_turn" if answer.stop_string is None else "stop_sequence"


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    prompt, completion = answer.token_counts
    return {
        "input_tokens": prompt,
        "output_tokens": completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }

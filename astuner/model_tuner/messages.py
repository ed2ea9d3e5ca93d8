"""Normalisation of OpenAI-style chat messages, and digests to compare them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.errors import WorkflowError, short_repr
from astuner.schema import Message, Messages, Tools

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES_OF_OTHERS = {
    "user": ("human", "customer"),
    "assistant": ("ai", "bot", "gpt", "model", "chatbot", "agent"),
    "system": ("instruction",),
    "tool": ("observation", "tool_response"),
}
_SIMILAR_ROLES = {role: role for role in _ROLES} | {
    other: role for role, others in _ROLES_OF_OTHERS.items() for other in others
}


def normalise(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with text content and OpenAI-style tool calls.

    Content may be a string, None, or a list of parts: `{"type": "text", "text": …}`, or DashScope's `{"text": …}`. The
    texts of the parts are concatenated.

    Raises:
        WorkflowError: there are no messages, or a message is not a mapping, has no role or an unknown role, or has a
            part that is not text.
    """
    if not messages:
        raise WorkflowError("the model was called without messages; pass at least one")
    return [_normalise_message(message, index) for index, message in enumerate(messages)]


def digests(messages: Messages, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return a digest for each message in a conversation (see `message_digest`).

    A tool message is identified by the index of the tool call that it answers, not by the id, which frameworks choose.

    Args:
        messages: normalised messages.
        known: the digests of the first messages, as far as they are known.
    """
    result, call_indices = list(known), dict[str, int]()
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            call_indices = {call["id"]: index for index, call in enumerate(message["tool_calls"])}
        if number >= len(known):
            result.append(message_digest(message, call_indices.get(message.get("tool_call_id", ""))))
    return result


def message_digest(message: Mapping[str, Any], answered_call: int | None = None) -> bytes:
    """Return a normalised message's digest, over its role, name, text, tool calls and the answered tool call's index.

    The ids of tool calls are left out, because frameworks invent their own, and so is reasoning, which many drop. The
    name of an assistant message is left out, because the model gives none, and frameworks add the agent's name.
    """
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError):
            # Frameworks in JavaScript write 2.0 as 2, and round integers of more than 53 bits.
            arguments = json.dumps(json.loads(arguments, parse_int=float), sort_keys=True)
        calls.append((call["function"]["name"], arguments))
    # Only some frameworks repeat the tool's name in its result.
    name = None if message["role"] in ("tool", "assistant") else message.get("name")
    text = json.dumps([message["role"], name, message["content"], calls, answered_call], ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def has_same_reasoning(messages: Messages, earlier: Messages) -> bool:
    """Return whether each message has the reasoning that the same message has in `earlier`, or none."""
    return all(
        not new.get("reasoning_content") or new["reasoning_content"] == old.get("reasoning_content")
        for new, old in zip(messages, earlier, strict=False)
    )


def tools_hash(tools: Tools | None) -> str:
    """Return a short hash that identifies a list of tools; "" for no tools."""
    if not tools:
        return ""
    return hashlib.blake2b(json.dumps(tools, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def shown_tools(tools: Tools | None) -> Sequence[Mapping[str, Any]] | None:
    """Return tool definitions as the model sees them: without `strict`, which tells the server to check arguments."""
    if not any("strict" in (tool.get("function") or {}) for tool in tools or ()):
        return tools
    return [
        {**tool, "function": {key: value for key, value in tool["function"].items() if key != "strict"}}
        for tool in tools or ()
    ]


def with_reasoning(messages: Messages, earlier: Messages) -> list[Mapping[str, Any]]:
    """Return `messages`, which start with the messages of `earlier`, with missing reasoning copied from `earlier`."""
    result = list(messages)
    for index, (new, old) in enumerate(zip(messages, earlier, strict=False)):
        if old.get("reasoning_content") and not new.get("reasoning_content"):
            result[index] = {**new, "reasoning_content": old["reasoning_content"]}
    return result


def _normalise_message(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise WorkflowError(f"message {index} must be a mapping with a role, got {short_repr(message)}")
    if message["role"] not in _ROLES:
        similar = _SIMILAR_ROLES.get(message["role"].lower())
        hint = f"; write {similar!r}" if similar else ""
        # A chat template may leave out a message with another role, without an error.
        raise WorkflowError(
            f"message {index} has the role {short_repr(message['role'])}; expected one of {', '.join(_ROLES)}{hint}"
        )
    result: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"), index)}
    if tool_calls := message.get("tool_calls"):
        if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, str | bytes):
            raise WorkflowError(f"message {index}: tool_calls must be a list, got {short_repr(tool_calls)}")
        result["tool_calls"] = [_normalise_tool_call(call, index) for call in tool_calls]
    if message.get("function_call"):
        raise WorkflowError(f"message {index} has a function_call, which OpenAI has replaced; write it to tool_calls")
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        result["reasoning_content"] = reasoning
    return result


def _text(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise WorkflowError(f"message {index}: content must be text or a list of parts, got {short_repr(content)}")
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(str(part["text"]))
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type", sorted(part)) if isinstance(part, Mapping) else type(part).__name__
            raise WorkflowError(f"message {index} has a part of type {kind!r}; only text parts are supported")
    return "".join(texts)


def _normalise_tool_call(call: object, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WorkflowError(f"message {index} has a tool call without a function name: {short_repr(call)}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = call.get("id", "") if isinstance(call, Mapping) else ""
    return {
        "id": str(identity or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }

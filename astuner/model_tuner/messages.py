"""Chat messages of any OpenAI-like dialect in one form, and digests that tell whether two are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.errors import WorkflowError
from astuner.schema import Message


def normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with text content and OpenAI-style tool calls.

    Content may be a string, None, or a list of parts (`{"type": "text", "text": …}`, or `{"text": …}` as
    DashScope has it); the texts of parts are joined.

    Raises:
        WorkflowError: a message is no mapping, has no role, or holds a part that is not text.
    """
    if not messages:
        raise WorkflowError("the model was called without messages; give it at least one")
    return [_normalise_one(message, index) for index, message in enumerate(messages)]


def digests(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return a digest of each message of a conversation, see `digest`.

    Ids of tool calls are frameworks' own affair; which call a tool's message answers is not, and counts.
    """
    found, places = [], dict[str, int]()
    for message in messages:
        if message.get("tool_calls"):
            places = {call["id"]: place for place, call in enumerate(message["tool_calls"])}
        found.append(digest(message, places.get(message.get("tool_call_id", ""))))
    return found


def digest(message: Mapping[str, Any], answers: int | None = None) -> bytes:
    """Return a digest of what a normalised message says: role, name, text, tool calls and the call that it `answers`.

    Ids of tool calls are left out, since frameworks make up their own, and so is reasoning, which many drop.
    """
    calls = [
        (call["function"]["name"], _canonical_arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    # Some frameworks give a tool's name with its result and some do not.
    name = None if message["role"] == "tool" else message.get("name")
    said = json.dumps([message["role"], name, message["content"], calls, answers], ensure_ascii=True)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


def thinks_alike(messages: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no message has other thinking than the same message of `earlier`; it may have none."""
    return all(
        not mine.get("reasoning_content") or mine["reasoning_content"] == theirs.get("reasoning_content")
        for mine, theirs in zip(messages, earlier, strict=False)
    )


def tools_hash(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return a short hash that identifies a tool list; "" for none."""
    if not tools:
        return ""
    return hashlib.blake2b(json.dumps(tools, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def with_reasoning(
    messages: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return `messages`, which begin as `earlier` does, with the thinking of `earlier` where they leave it out."""
    told = list(messages)
    for place, (mine, theirs) in enumerate(zip(messages, earlier, strict=False)):
        if theirs.get("reasoning_content") and not mine.get("reasoning_content"):
            told[place] = {**mine, "reasoning_content": theirs["reasoning_content"]}
    return told


def _normalise_one(message: Message, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise WorkflowError(f"message {index} must be a mapping with a role, got {message!r}")
    result: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"), index)}
    if message.get("tool_calls"):
        result["tool_calls"] = [_normalise_tool_call(call, index) for call in message["tool_calls"]]
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
    if isinstance(content, Sequence):
        return "".join(_part_text(part, index) for part in content)
    raise WorkflowError(f"message {index}: content must be text or a list of parts, got {content!r}")


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", sorted(part)) if isinstance(part, Mapping) else type(part).__name__
    raise WorkflowError(f"message {index} holds a part of kind {kind!r}; only text parts can be tuned on")


def _normalise_tool_call(call: object, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise WorkflowError(f"message {index} holds a tool call without a function name: {call!r}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = call.get("id", "") if isinstance(call, Mapping) else ""
    return {
        "id": str(identity or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _canonical_arguments(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments

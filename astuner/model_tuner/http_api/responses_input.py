"""The conversation in a request to OpenAI's Responses API, and answers as items in a conversation."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from astuner.errors import InvalidRequestError, UnsupportedParameterError, short_repr
from astuner.model_tuner.http_api.openai_completions import read_text
from astuner.schema import LlmCall, Message

_ITEM_ID = re.compile(r"(?:(?:rs|msg)_(.*)|fc_(.*)/[0-9]+)", re.DOTALL)
_WITH_INSTRUCTIONS = "/i"
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
# The text after this prefix is not encrypted. Clients do not read it, and send it back.
_REASONING_PREFIX = "astuner:"


def response_id(call_id: str, *, has_instructions: bool) -> str:
    """Return the id of a response.

    The id contains whether the conversation starts with instructions, because a later response does not inherit them.
    """
    return f"resp_{call_id}" + (_WITH_INSTRUCTIONS if has_instructions else "")


def output_items(answer: Message, call_id: str, *, encrypt_reasoning: bool = False) -> list[dict[str, Any]]:
    """Return an answer as items: its reasoning, its text and its tool calls.

    An answer without tool calls has a text, which may be empty.

    Args:
        answer: the answer, as a message in OpenAI's format.
        call_id: the call's id, from which the ids of the items are made.
        encrypt_reasoning: whether the reasoning is also in the field `encrypted_content`, for clients that send back
            only this field.
    """
    items: list[dict[str, Any]] = []
    if reasoning := answer.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{call_id}", "summary": [], "content": content})
        if encrypt_reasoning:
            encoded = base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()
            items[-1]["encrypted_content"] = _REASONING_PREFIX + encoded
    calls = answer.get("tool_calls", ())
    if answer["content"] or not calls:
        part = {"type": "output_text", "text": answer["content"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg_{call_id}", "role": "assistant", "content": [part]})
    for index, call in enumerate(calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call_id}/{index}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return [{**item, "status": "completed"} for item in items]


def input_messages(given: Mapping[str, Any], calls: Sequence[LlmCall]) -> list[Message]:
    """Return the conversation of a request, in OpenAI's format for chat completions.

    Args:
        given: the parameters of the body that are not null.
        calls: the finished calls of the episode, to which `previous_response_id` and references to items refer.

    Raises:
        InvalidRequestError: the input is invalid, or refers to a response that is not of this episode.
        UnsupportedParameterError: an item is of a type that the model cannot read.
    """
    messages: list[Message] = []
    instructions = given.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise InvalidRequestError(f"instructions must be a string, got {short_repr(instructions)}", "instructions")
        messages.append({"role": "system", "content": instructions})
    if "previous_response_id" in given:
        identity = given["previous_response_id"]
        candidates = [(call, has_instructions) for call in calls for has_instructions in (False, True)]
        found = [pair for pair in candidates if identity == response_id(pair[0].call_id, has_instructions=pair[1])]
        if not found:
            raise InvalidRequestError(
                f"previous_response_id={short_repr(identity)} is not a response of this episode", "previous_response_id"
            )
        call, has_instructions = found[0]
        messages += call.messages[has_instructions:]
    items = given.get("input", [])
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise InvalidRequestError(f"input must be a string or a list of items, got {short_repr(items)}", "input")
    turns = _Turns(calls)
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    if not messages and not turns.messages:
        raise InvalidRequestError("input must not be empty", "input")
    return messages + turns.messages


class _Turns:
    """Collects items as messages. The reasoning, text and tool calls of one answer become one message."""

    def __init__(self, calls: Sequence[LlmCall]) -> None:
        self.messages: list[Message] = []
        self._calls = calls
        # The assistant's message that further items may belong to, and the type of its last item.
        self._answer: dict[str, Any] | None = None
        self._last = ""

    def add(self, item: object, where: str) -> None:
        """Add an item; `where` is its place in the body."""
        if not isinstance(item, Mapping):
            raise InvalidRequestError(f"{where} must be an object, got {short_repr(item)}", where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference":
            self.add(self._referenced(item.get("id"), where), where)
        elif kind == "reasoning":
            # Only the first item of an answer is reasoning.
            self._turn(kind, after=())["reasoning_content"] = _reasoning(item, where)
        elif kind == "function_call":
            function = {"name": read_text(item, "name", where), "arguments": read_text(item, "arguments", where)}
            call = {"id": read_text(item, "call_id", where), "type": "function", "function": function}
            answer = self._turn(kind, after=("reasoning", "message", "function_call"))
            answer.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            self._answer = None
            self.messages.append(
                {"role": "tool", "tool_call_id": read_text(item, "call_id", where), "content": content}
            )
        elif kind == "message":
            self._add_message(item, where)
        else:
            raise UnsupportedParameterError(
                f"{where} has the type {short_repr(kind)}; the model in training reads only message, reasoning, "
                "function_call, function_call_output and item_reference",
                where,
            )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidRequestError(
                f"{where}.role must be one of {', '.join(_ROLES)}, got {short_repr(role)}", f"{where}.role"
            )
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn("message", after=("reasoning",))["content"] = content
        else:
            self._answer = None
            self.messages.append({"role": role, "content": content})

    def _turn(self, kind: str, after: Sequence[str]) -> dict[str, Any]:
        """Return the open message if its last item is of a type in `after`, and else a new one."""
        if self._answer is None or self._last not in after:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        self._last = kind
        return self._answer

    def _referenced(self, identity: object, where: str) -> Mapping[str, Any]:
        match = _ITEM_ID.fullmatch(identity) if isinstance(identity, str) else None
        call = match and next((call for call in self._calls if call.call_id in match.groups()), None)
        items = output_items(call.messages[-1], call.call_id) if call else []
        for item in items:
            if item["id"] == identity:
                return item
        raise InvalidRequestError(
            f"{where} refers to {short_repr(identity)}, which is no item in this episode's answers", where
        )


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item; "" if the client has left it out."""
    encrypted = item.get("encrypted_content")
    if item.get("content"):
        return _text_of_parts(item["content"], ("reasoning_text",), f"{where}.content")
    if encrypted is None:
        return _text_of_parts(item.get("summary") or [], ("summary_text",), f"{where}.summary")
    try:
        if not isinstance(encrypted, str) or not encrypted.startswith(_REASONING_PREFIX):
            raise ValueError
        return base64.b64decode(encrypted[len(_REASONING_PREFIX) :], validate=True).decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error):
        raise InvalidRequestError(
            f"{where}.encrypted_content is not from this gateway; leave the item out", f"{where}.encrypted_content"
        ) from None


def _content(content: object, where: str) -> str:
    return content if isinstance(content, str) else _text_of_parts(content, _TEXT_PARTS, where)


def _text_of_parts(parts: object, kinds: Sequence[str], where: str) -> str:
    """Return the joined text of several parts."""
    if not isinstance(parts, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts, got {short_repr(parts)}", where)
    texts = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidRequestError(f"{place} must be a part with a type, got {short_repr(part)}", place)
        if part["type"] not in kinds:
            raise UnsupportedParameterError(
                f"{place} is a part of the type {short_repr(part['type'])}; the model in training reads only text "
                f"there ({', '.join(kinds)})",
                place,
            )
        texts.append(read_text(part, "text", place))
    return "".join(texts)

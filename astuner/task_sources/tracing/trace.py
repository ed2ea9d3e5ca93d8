"""A trace: the conversations of an agent that answered a user, and the user's feedback."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astuner.errors import short_repr
from astuner.schema import Message

_RATINGS = {
    **dict.fromkeys(("up", "good", "like", "thumbs_up", "positive", "pass", "yes", "true", "correct"), 1.0),
    **dict.fromkeys(("down", "bad", "dislike", "thumbs_down", "negative", "fail", "no", "false", "incorrect"), 0.0),
}


class TraceProblem(Exception):
    """A row or span is not valid; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a user said about an answer: a rating (higher is better), a corrected answer, and a remark."""

    rating: float | None = None
    edit: str = ""
    comment: str = ""

    def merged(self, later: Feedback) -> Feedback:
        """Return this feedback with the fields that are set in `later` replaced."""
        rating = self.rating if later.rating is None else later.rating
        return Feedback(rating, later.edit or self.edit, later.comment or self.comment)


@dataclass(frozen=True, slots=True)
class TracedConversation:
    """The messages and tools of one LLM call in OpenAI's format; the last message is the answer.

    `agent` is the agent's name, or the model's if the trace has no agent names.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    agent: str = ""

    def extends(self, earlier: TracedConversation) -> bool:
        """Return whether `earlier` is a proper beginning of this conversation."""
        size = len(earlier.messages)
        return size < len(self.messages) and message_keys(self.messages[:size]) == message_keys(earlier.messages)

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the answer."""
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        """The text of the answer."""
        return content_text(self.messages[-1])


@dataclass(frozen=True, slots=True)
class Trace:
    """One request of a user to an agent.

    Attributes:
        trace_id: unique within its source.
        conversations: the LLM calls that no later call of the trace extends, in order. The last one answers the user.
        start_time: seconds since the epoch; 0 if unknown.
        metadata: further fields of the task, such as a reference answer; an episode has its task's fields.
    """

    trace_id: str
    conversations: tuple[TracedConversation, ...]
    feedback: Feedback = Feedback()
    start_time: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> TracedConversation:
        """The conversation that answers the user."""
        return self.conversations[-1]

    @property
    def question(self) -> str:
        """The last message of the user in the main conversation; "" if there is none."""
        return next((content_text(m) for m in reversed(self.main.prompt) if m["role"] == "user"), "")

    def with_feedback(self, later: Feedback) -> Trace:
        """Return the trace with further feedback."""
        return replace(self, feedback=self.feedback.merged(later))


def not_extended(conversations: Iterable[TracedConversation]) -> tuple[TracedConversation, ...]:
    """Return the conversations that no later one extends."""
    kept: list[TracedConversation] = []
    for conversation in conversations:
        kept = [k for k in kept if not conversation.extends(k)]
        kept.append(conversation)
    return tuple(kept)


def message_keys(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a text for each message that is equal for equal messages.

    Clients repeat an answer in another form: without its reasoning, with null instead of an empty content, or with
    other spacing in a tool call's arguments. This makes no difference.
    """
    keys = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            arguments: Any = function.get("arguments")
            with contextlib.suppress(TypeError, ValueError):  # else it is compared as it is
                arguments = json.loads(arguments)
            calls.append([function.get("name"), arguments])
        parts = [message["role"], content_text(message), calls, message.get("tool_call_id")]
        keys.append(json.dumps(parts, sort_keys=True))
    return keys


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)


def read_rating(value: object) -> float | None:
    """Return a rating as a number. `up`, `good` and `true` are 1, `down`, `bad` and `false` are 0.

    Raises:
        TraceProblem: the value is neither a finite number nor one of these words.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.strip().lower() in _RATINGS:
        return _RATINGS[value.strip().lower()]
    try:
        rating = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        rating = math.nan
    if not math.isfinite(rating):
        raise TraceProblem(f"rating is {short_repr(value)}; expected a number, or one of {', '.join(_RATINGS)}")
    return rating


def read_feedback(row: Mapping[str, Any]) -> Feedback:
    """Return the feedback in a row's fields `rating`, `edit` and `comment`, or in its field `feedback`.

    Raises:
        TraceProblem: a field is not valid.
    """
    fields = row.get("feedback") if isinstance(row.get("feedback"), Mapping) else row
    assert isinstance(fields, Mapping)
    texts = {}
    for name in ("edit", "comment"):
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            raise TraceProblem(f"{name} is {short_repr(value)}; expected a text")
        texts[name] = value or ""
    return Feedback(read_rating(fields.get("rating")), **texts)


def read_messages(value: object, where: str) -> list[Message]:
    """Return chat messages in OpenAI's format; `TraceProblem` if they are not valid.

    Keys whose value is null, which chat templates need not know, are left out, and lists of texts become a text.
    """
    if not isinstance(value, list) or not value:
        raise TraceProblem(f"{where} is {short_repr(value)}; expected a list of chat messages")
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TraceProblem(f"{where} contains {short_repr(message)}; expected an object with role and content")
        if not isinstance(message.get("content"), str | list | None):
            raise TraceProblem(f"{where} contains content of type {type(message['content']).__name__}")
        plain = {key: item for key, item in message.items() if item is not None and key != "content"}
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
            content = content_text(message)
        messages.append({"role": plain.pop("role"), "content": content or "", **plain})
    return messages


def read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return tool definitions in OpenAI's format; those without `function` are wrapped in it."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    fields = ("name", "description", "parameters")
    return tuple(
        tool
        if "function" in tool
        else {"type": "function", "function": {key: item for key, item in tool.items() if key in fields}}
        for tool in value
        if isinstance(tool, Mapping)
    )

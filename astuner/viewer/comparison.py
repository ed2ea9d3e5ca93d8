"""JSON content of the page that compares two episodes: aligned messages, with their differences by words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

from astuner.run_record.answers import message_text
from astuner.run_record.episode_file import RecordedEpisode
from astuner.viewer.conversation import conversation
from astuner.viewer.word_diff import DiffBudget, word_diff

T = TypeVar("T")
_MAX_MESSAGES = 200
_MAX_TEXT = 20_000


@dataclass(frozen=True, slots=True)
class _Message:
    """A message to compare.

    Attributes:
        role: Its role.
        agent: The agent that wrote it; "" if no LLM call did.
        text: Thoughts, text and tool calls.
    """

    role: str
    agent: str
    text: str


def compare(left: RecordedEpisode, right: RecordedEpisode) -> dict[str, Any]:
    """Return the messages of two episodes as aligned rows.

    Returns:
        `rows`, each with `left` and `right`: None, or the `role`, the `agent` and the `pieces` of a message (see
        `word_diff`); and `same`, True if both sides have the same text. `omitted`, the number of messages of each
        episode that are left out.
    """
    sides = [_messages(recorded) for recorded in (left, right)]
    shown = [messages[:_MAX_MESSAGES] for messages in sides]
    budget = DiffBudget()
    rows = [_row(old, new, budget) for old, new in _aligned(*shown)]
    return {"rows": rows, "omitted": [len(full) - len(part) for full, part in zip(sides, shown, strict=True)]}


def _row(old: _Message | None, new: _Message | None, budget: DiffBudget) -> dict[str, Any]:
    if old and new:
        pieces = word_diff(old.text, new.text, budget)
        return {"left": _side(old, pieces[0]), "right": _side(new, pieces[1]), "same": old.text == new.text}
    return {
        "left": old and _side(old, [(1, old.text)]),
        "right": new and _side(new, [(1, new.text)]),
        "same": False,
    }


def _side(message: _Message, pieces: Sequence[tuple[int, str]]) -> dict[str, Any]:
    return {"role": message.role, "agent": message.agent, "pieces": pieces}


def _aligned(left: Sequence[_Message], right: Sequence[_Message]) -> Iterator[tuple[_Message | None, _Message | None]]:
    """Yield pairs: equal messages first, then messages of the same speaker between them, in order."""
    for is_equal, old, new in _matches(left, right, lambda message: message):
        if is_equal:
            yield from zip(old, new, strict=True)
            continue
        for same_speaker, olds, news in _matches(old, new, lambda message: (message.role, message.agent)):
            if same_speaker:
                yield from zip(olds, news, strict=True)
            else:
                yield from ((message, None) for message in olds)
                yield from ((None, message) for message in news)


def _matches(
    left: Sequence[T], right: Sequence[T], key: Callable[[T], object]
) -> Iterator[tuple[bool, Sequence[T], Sequence[T]]]:
    matcher = SequenceMatcher(None, [key(item) for item in left], [key(item) for item in right], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        yield tag == "equal", left[a:b], right[c:d]


def _messages(recorded: RecordedEpisode) -> list[_Message]:
    return [
        _Message(_role(message), agent, _cut(_text(message))) for message, agent in conversation(recorded.episode.calls)
    ]


def _role(message: object) -> str:
    return str(message.get("role", "?"))[:40] if isinstance(message, Mapping) else "?"


def _text(message: object) -> str:
    if not isinstance(message, Mapping):
        return _as_text(message)
    thoughts = message.get("reasoning_content") or message.get("thinking")
    parts = [f"[thinking] {_as_text(thoughts)}"] if thoughts else []
    content = message.get("content")
    parts += [message_text(content) or _as_text(content)] if content else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else [calls] if calls else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(f"[calls {_as_text(function.get('name'))}] {_as_text(function.get('arguments'))}")
        else:
            parts.append(f"[calls] {_as_text(call)}")
    return "\n".join(parts)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"

"""JSON content of the page that compares two episodes: aligned messages, with their differences by words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.episodes import message_text
from astuner.viewer.episode_view import conversation

Piece = tuple[int, str]
"""0 for a part that both texts have, 1 for a part that only this text has; and the part."""

# A word with the white space after it.
_WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
# `SequenceMatcher` takes time in proportion to the product of the lengths: half a second for 2,000 by 2,000 words.
_MAX_PRODUCT = 4_000_000
T = TypeVar("T")
_MAX_MESSAGES = 200
_MAX_TEXT = 20_000


class DiffBudget:
    """Bounds the work of many comparisons. Texts beyond the bound are compared by lines or not at all."""

    def __init__(self, products: int = 2 * _MAX_PRODUCT) -> None:
        self._left = products

    def take(self, left: int, right: int) -> bool:
        """Return whether two sequences of these lengths may be compared, and count them if so."""
        product = left * right
        if product > min(self._left, _MAX_PRODUCT):
            return False
        self._left -= product
        return True


def word_diff(left: str, right: str, budget: DiffBudget) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces of two texts.

    The pieces of each text add up to it. Lines are compared first, then the words of the lines that differ. Parts that
    exceed the budget are marked as different as a whole.
    """
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for same, old, new in _blocks(left.splitlines(keepends=True), right.splitlines(keepends=True), budget):
        if same:
            _append(pieces, 0, old, new)
            continue
        for is_equal, old_words, new_words in _blocks(_WORD.findall("".join(old)), _WORD.findall("".join(new)), budget):
            _append(pieces, 0 if is_equal else 1, old_words, new_words)
    return pieces


def _blocks(
    left: Sequence[str], right: Sequence[str], budget: DiffBudget
) -> list[tuple[bool, Sequence[str], Sequence[str]]]:
    """Return runs of equal items, and runs in which the items differ."""
    start = _common(left, right)
    end = _common(left[start:][::-1], right[start:][::-1])
    old, new = left[start : len(left) - end], right[start : len(right) - end]
    blocks = [(True, left[:start], right[:start])]
    if not old or not new or not budget.take(len(old), len(new)):
        blocks.append((False, old, new))
    else:
        for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            blocks.append((tag == "equal", old[a:b], new[c:d]))
    return [*blocks, (True, left[len(left) - end :], right[len(right) - end :])]


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the number of equal items at the start."""
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
                min(len(left), len(right)))  # fmt: skip


def _append(pieces: tuple[list[Piece], list[Piece]], kind: int, old: Sequence[str], new: Sequence[str]) -> None:
    for side, items in zip(pieces, (old, new), strict=True):
        text = "".join(items)
        if text and side and side[-1][0] == kind:
            side[-1] = (kind, side[-1][1] + text)
        elif text:
            side.append((kind, text))


@dataclass(frozen=True, slots=True)
class _Message:
    """A message to compare: its text has thoughts and tool calls. `agent` is "" if no LLM call generated it."""

    role: str
    agent: str
    text: str


def compare(left: RecordedEpisode, right: RecordedEpisode) -> dict[str, Any]:
    """Return the messages of two episodes as aligned rows.

    Returns:
        `rows`, each with `left` and `right`: None, or the `role`, the `agent` and the `pieces` of a message (see
        `word_diff`); and `same`, True if both sides have the same text. `omitted`, the number of messages in each
        episode that are left out.
    """
    sides: list[list[_Message]] = [[], []]
    for messages, side in zip(sides, (left, right), strict=True):
        for message, agent in conversation(side.episode.calls):
            role = str(message.get("role", "?"))[:40] if isinstance(message, Mapping) else "?"
            text = _text(message)
            cut = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"
            messages.append(_Message(role, agent, cut))
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

"""An episode's conversation in short, to be read beside those of its group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from astuner.schema import Episode

_LONGEST_TEXT = 1500
_MOST_MESSAGES = 60


def transcript(episode: Episode) -> list[dict[str, Any]]:
    """Return the messages of the longest conversation, in the form of the chat API and with long texts cut."""
    if not episode.calls:
        return []
    messages = max(episode.calls, key=lambda call: (len(call.messages), call.end_time)).messages
    if len(messages) > _MOST_MESSAGES:
        messages = (*messages[: _MOST_MESSAGES // 2], *messages[-_MOST_MESSAGES // 2 :])
    return [_short(message) for message in messages]


def _short(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "content": _cut(str(message))}
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": str(message.get("role", "?"))[:40],
        "name": str(message.get("name") or "")[:60],
        "content": _cut(_text(content)) if content else "",
        "tool_calls": [_short_call(call) for call in calls[:20]] if isinstance(calls, list) else [],
    }


def _short_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {"function": {"arguments": _cut(_text(call))}}
    return {"function": {"name": str(function.get("name"))[:60], "arguments": _cut(_text(function.get("arguments")))}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + f"… ({len(text):,} characters)"

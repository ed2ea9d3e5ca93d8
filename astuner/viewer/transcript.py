"""An episode's conversation in short, to be read beside those of its group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from astuner.schema import Episode

_LONGEST_TEXT = 1500
_MOST_MESSAGES = 60


def transcript(episode: Episode) -> list[dict[str, Any]]:
    """Return role and text of the messages of the longest conversation, long ones cut."""
    if not episode.calls:
        return []
    messages = max(episode.calls, key=lambda call: (len(call.messages), call.end_time)).messages
    if len(messages) > _MOST_MESSAGES:
        messages = (*messages[: _MOST_MESSAGES // 2], *messages[-_MOST_MESSAGES // 2 :])
    return [_short(message) for message in messages]


def _short(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "text": _cut(str(message)), "calls": []}
    content = message.get("content")
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role", "?"))[:40],
        "text": _cut(content if isinstance(content, str) else json.dumps(content, default=str)) if content else "",
        "calls": [_cut(json.dumps(call, default=str)) for call in calls[:20]] if isinstance(calls, list) else [],
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + f"… ({len(text):,} characters)"

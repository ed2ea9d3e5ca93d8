"""How the model in training uses the tools that an episode offers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from astuner.schema import Episode

FAILURE = re.compile(
    r"^\W{0,3}(?:error\b|traceback\b|exception\b|failed\b|[A-Z]\w*(?:Error|Exception)\b|returncode>(?!0<))",
    re.IGNORECASE,
)
"""The beginning of a tool's result that is an error. A sandboxed program begins with its return code."""


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, or its parts' texts if the content is a list."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


@dataclass(frozen=True)
class ToolUse:
    """The use of tools in an episode.

    Attributes:
        is_offered: whether a request of the model in training has tools.
        calls: number of tool calls in its answers.
        failed: number of results that are errors.
    """

    is_offered: bool
    calls: int = 0
    failed: int = 0

    @staticmethod
    def of(episode: Episode) -> ToolUse:
        """Count the tool calls of an episode. A result that several requests contain counts once."""
        own = [call for call in episode.calls if call.trained]
        failed = {
            (call.agent_name, message.get("tool_call_id") or place)
            for call in own
            for place, message in enumerate(call.messages[:-1])
            if message.get("role") == "tool" and FAILURE.search(text_of(message).strip())
        }
        calls = sum(len(call.messages[-1].get("tool_calls") or ()) for call in own if call.messages)
        return ToolUse(any(call.tools_hash for call in own), calls, len(failed))

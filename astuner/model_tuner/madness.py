"""Signs that a model lost control of what it writes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from astuner.model_tuner.codec import ParsedAnswer

# English and code compress to 0.2–0.6 of their size; text that repeats itself without end goes far below.
_LONG_ENOUGH = 400
_REPETITIVE = 0.06
_BROKEN_SHARE = 0.05


def signs_of_madness(text: str, answer: ParsedAnswer, checklist: Sequence[str]) -> str | None:
    """Return what is wrong with a completion, or None.

    Args:
        text: the completion's whole text.
        answer: what it was parsed into.
        checklist: `nonsense` looks for endless repetition and for broken characters (bytes that are no
            UTF-8, control characters), whatever the language or script; `wrong_toolcall` for tool calls that
            cannot be parsed.
    """
    if "wrong_toolcall" in checklist and answer.malformed:
        return f"malformed tool call: {answer.malformed[0][:200]!r}"
    if "nonsense" in checklist:
        return _nonsense(text)
    return None


def _nonsense(text: str) -> str | None:
    if not text:
        return None
    broken = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\n\r\t") for char in text)
    if broken > 1 and broken / len(text) > _BROKEN_SHARE:
        return f"{broken} broken characters in {len(text)}"
    encoded = text.encode(errors="replace")
    if len(encoded) >= _LONG_ENOUGH:
        ratio = len(zlib.compress(encoded)) / len(encoded)
        if ratio < _REPETITIVE:
            return f"repeats itself (compresses to {ratio:.1%})"
    return None

"""Detection of degenerate model output: endless repetition, broken characters, malformed tool calls."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from astuner.model_tuner.codec import ParsedAnswer

# English and code compress to 0.2–0.6 of their size; text that repeats without end compresses much further.
_MIN_BYTES = 400
_MAX_REPETITIVE_RATIO = 0.06
_MIN_BROKEN_SHARE = 0.05


def find_degenerate_output(text: str, answer: ParsedAnswer, checklist: Sequence[str]) -> str | None:
    """Return a description of the fault of a completion, or None.

    Args:
        text: the text of the completion.
        answer: the parsed completion.
        checklist: the checks to run. `nonsense` detects endless repetition and broken characters (invalid UTF-8,
            control characters) in any language; `wrong_toolcall` detects tool calls that cannot be parsed.
    """
    if "wrong_toolcall" in checklist and answer.malformed:
        return f"malformed tool call: {answer.malformed[0][:200]!r}"
    if not text or "nonsense" not in checklist:
        return None
    broken = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\n\r\t") for char in text)
    if broken > 1 and broken / len(text) > _MIN_BROKEN_SHARE:
        return f"{broken} broken characters in {len(text)}"
    encoded = text.encode(errors="replace")
    if len(encoded) >= _MIN_BYTES:
        ratio = len(zlib.compress(encoded)) / len(encoded)
        if ratio < _MAX_REPETITIVE_RATIO:
            return f"repeats itself (compresses to {ratio:.1%})"
    return None

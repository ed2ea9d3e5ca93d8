"""Control characters in texts that a terminal shows."""

from __future__ import annotations

import re

# Control characters, and Unicode characters that are invisible or reorder the text that follows.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def escape_control_characters(text: str) -> str:
    """Replace characters that control the terminal, reorder text or are invisible by visible names: ␛, <U+202E>.

    Line feeds and tabs stay.
    """

    def name(match: re.Match[str]) -> str:
        code = ord(match.group())
        return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"

    return _CONTROL_CHARACTERS.sub(name, text)

"""Texts of tasks, models and errors as a terminal may have them: without a character that does something to it."""

from __future__ import annotations

import re

# Beside control characters: those that reorder what follows, or that are invisible and hide things, as on the page.
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` with characters by name that would move the cursor, colour, reorder or not be seen: ␛, <U+202E>.

    Line feeds and tabs stay.
    """
    return _ODD.sub(lambda found: _name(found.group()), text)


def visible_line(text: str) -> str:
    """Be `visible`, and a single line."""
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def _name(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"

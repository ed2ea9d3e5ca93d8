"""Letters of many scripts, mixed."""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import lru_cache

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer, windows

_MIN_SCRIPTS = 4
_MAX_SCRIPT_CHANGES = 0.5

_SCRIPTS: tuple[str, ...] = (
    "LATIN",
    "CYRILLIC",
    "GREEK",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
    "BENGALI",
    "TAMIL",
    "TELUGU",
    "THAI",
    "ARMENIAN",
)
_SCRIPTS += (
    "GEORGIAN",
    "ETHIOPIC",
    "KHMER",
    "LAO",
    "MYANMAR",
    "GUJARATI",
    "KANNADA",
    "MALAYALAM",
    "SINHALA",
    "TIBETAN",
)
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")


class MixedScripts(AnomalyCheck):
    """Finds neighbouring words, or letters in one word, that come from many scripts."""

    name = "mixed_scripts"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if the script changes at most words of a window."""
        for window in windows(answer.text):
            changes = steps = 0
            seen: set[str] = set()
            for clause in re.split(r"[^\w ]+|\n+|_+|\d+", window):
                scripts = [script for word in clause.split() for script in word_scripts(word)]
                seen.update(scripts)
                steps += max(len(scripts) - 1, 0)
                changes += sum(a != b for a, b in itertools.pairwise(scripts))
            if len(seen) >= _MIN_SCRIPTS and steps >= 8 and changes / steps > _MAX_SCRIPT_CHANGES:
                return f"{len(seen)} scripts mixed: {window[:60]!r}"
        return None


def word_scripts(word: str) -> list[str]:
    """Return the scripts of a word's letters, each once where it repeats."""
    scripts: list[str] = []
    for char in word:
        script = script_of(char)
        if script is not None and scripts[-1:] != [script]:
            scripts.append(script)
    return scripts


@lru_cache(maxsize=65536)
def script_of(char: str) -> str | None:
    """Return the script of a letter, as in its Unicode name; None for other characters and rare scripts."""
    prefix = unicodedata.name(char, "").partition(" ")[0] if char.isalpha() else ""
    if prefix in _EAST_ASIAN:
        return "EAST ASIAN"
    return prefix if prefix in _SCRIPTS else None

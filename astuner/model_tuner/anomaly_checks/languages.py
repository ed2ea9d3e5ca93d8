"""Finds a change of language in mid-paragraph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby

from astuner.model_tuner.anomaly_checks.base import AnomalyCheck, CheckedAnswer
from astuner.model_tuner.anomaly_checks.scripts import script_of
from astuner.model_tuner.anomaly_checks.words import count_function_words
from astuner.schema import Message

# Letters of a script before and after the change. A letter of East Asian scripts is a syllable or a word.
_MIN_BEFORE = 30
_MIN_AFTER = 25
_MIN_BEFORE_EAST_ASIAN = 8
_MIN_AFTER_EAST_ASIAN = 12
_MIN_SHARE = 0.8
# Latin letters inside of other text are code, names or quotations, unless they have the function words of a sentence.
_MIN_FUNCTION_WORDS = 4
_MIN_FUNCTION_WORD_SHARE = 0.25
# A request with this many letters of a script, or with the name of one of its languages, asks for it.
_MIN_REQUESTED = 4

# Text in quotes or brackets, after a colon, in a table or in another paragraph may be in another language.
_BOUNDARIES = re.compile(r"\s{3,}|\t|[\n\"“”„«»‘’‚()（）\[\]{}<>:：`|*_=/\\「」『』《》–—]+|(?<!\w)'|'(?!\w)")
_LANGUAGES = {
    "ARABIC": "arabic|persian|farsi|urdu|pashto|uyghur",
    "ARMENIAN": "armenian",
    "BENGALI": "bengali|bangla|assamese",
    "CYRILLIC": "russian|ukrainian|bulgarian|serbian|macedonian|belarusian|kazakh|mongolian|kyrgyz|tajik|cyrillic",
    "DEVANAGARI": "hindi|sanskrit|marathi|nepali|devanagari",
    "EAST ASIAN": "chinese|mandarin|cantonese|japanese|korean|kanji|kana|hangul",
    "ETHIOPIC": "amharic|tigrinya|ethiopi",
    "GEORGIAN": "georgian",
    "GREEK": "greek",
    "GUJARATI": "gujarati",
    "HEBREW": "hebrew|yiddish",
    "KANNADA": "kannada",
    "KHMER": "khmer|cambodian",
    "LAO": "lao",
    "LATIN": "english|german|french|spanish|italian|portuguese|polish|turkish|vietnamese|latin",
    "MALAYALAM": "malayalam",
    "MYANMAR": "burmese|myanmar",
    "SINHALA": "sinhala",
    "TAMIL": "tamil",
    "TELUGU": "telugu",
    "THAI": "thai",
    "TIBETAN": "tibetan",
}
_ANY_LANGUAGE = re.compile(r"translat|multilingual|languages", re.IGNORECASE)
_NAMED = {script: re.compile(rf"\b(?:{names})\b", re.IGNORECASE) for script, names in _LANGUAGES.items()}


class LanguageSwitch(AnomalyCheck):
    """Finds answers that continue in another script in the middle of a paragraph, although the request does not use it.

    Languages that share a script are not distinguished.
    """

    name = "language_switch"

    def find(self, answer: CheckedAnswer) -> str | None:
        """Return a fault if most of a paragraph's beginning is in one script, and the rest in another one."""
        for part in _BOUNDARIES.split(answer.text):
            change = _change_of_script(part)
            if change is not None:
                position, script = change
                if not _is_requested(script, answer.messages):
                    return f"changes to {script.lower()} letters after {part[max(position - 30, 0) : position]!r}"
        return None


def _change_of_script(text: str) -> tuple[int, str] | None:
    """Return where a text changes its script for good, and to which one; None if it does not."""
    letters = [(index, script) for index, char in enumerate(text) if (script := script_of(char)) is not None]
    scripts = [script for _, script in letters]
    if len(set(scripts)) < 2:
        return None
    runs = [(script, len(list(run))) for script, run in groupby(scripts)]
    ends = list(accumulate(length for _, length in runs))
    for (before, _), end, (after, _) in zip(runs, ends, runs[1:], strict=False):
        if end < _least(before, _MIN_BEFORE, _MIN_BEFORE_EAST_ASIAN):
            continue
        if len(scripts) - end < _least(after, _MIN_AFTER, _MIN_AFTER_EAST_ASIAN):
            break
        shares = (_share(scripts[:end], before), _share(scripts[end:], after))
        position = letters[end][0]
        if min(shares) >= _MIN_SHARE and (after != "LATIN" or _is_latin_sentence(text[position:])):
            return position, after
    return None


def _is_latin_sentence(text: str) -> bool:
    words = re.findall(r"\w+", text.lower())
    return count_function_words(words) >= max(_MIN_FUNCTION_WORDS, _MIN_FUNCTION_WORD_SHARE * len(words))


def _least(script: str, usual: int, east_asian: int) -> int:
    return east_asian if script == "EAST ASIAN" else usual


def _share(scripts: Sequence[str], script: str) -> float:
    return scripts.count(script) / len(scripts)


def _is_requested(script: str, messages: Sequence[Message]) -> bool:
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else str(content or "")
        if _ANY_LANGUAGE.search(text) or (script in _NAMED and _NAMED[script].search(text)):
            return True
        if sum(script_of(char) == script for char in text) >= _MIN_REQUESTED:
            return True
    return False

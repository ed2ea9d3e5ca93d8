"""Checks of the model's answers for degenerate output, such as endless repetition (`compute_madness_checklist`).

The checks are rules with wide margins, not a language model. `campaigns/anomaly_checks.py` measures how often
they flag normal text, and how much degenerate output they find.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import numpy as np

from astuner.model_tuner.codec import ParsedAnswer
from astuner.schema import Messages

# Length of a window, in characters. The frequencies of letter pairs are stable in it.
_WINDOW = 400


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """An answer of the model, as the checks see it.

    Attributes:
        text: the decoded completion, with special tokens.
        messages: the messages of the request, to which the model answered.
    """

    text: str
    parsed: ParsedAnswer
    messages: Messages = ()


def find_anomaly(answer: CheckedAnswer, checklist: Iterable[str]) -> tuple[str, str] | None:
    """Return the name of the first check that an answer fails, with the fault's description; None for a good answer.

    Args:
        checklist: names of checks, or `nonsense` for those in `NONSENSE`.

    Raises:
        KeyError: there is no check with a name.
    """
    names = {each for name in checklist for each in (NONSENSE if name == "nonsense" else (name,))}
    if unknown := names - CHECKS.keys():
        raise KeyError(f"there is no anomaly check {min(unknown)!r}; expected nonsense or one of {', '.join(CHECKS)}")
    for name, find in CHECKS.items():
        fault = find(answer) if name in names else None
        if fault is not None:
            return name, fault
    return None


def _windows(text: str) -> Iterator[str]:
    """Yield overlapping windows that cover a text, so that a fault after a normal start is found."""
    for start in range(0, max(len(text) - _WINDOW // 2, 1), _WINDOW // 2):
        yield text[start : start + _WINDOW]


def _wrong_tool_call(answer: CheckedAnswer) -> str | None:
    """Find tool calls that cannot be parsed."""
    malformed = answer.parsed.malformed
    return f"malformed tool call: {malformed[0][:200]!r}" if malformed else None


def _broken_characters(answer: CheckedAnswer) -> str | None:
    """Find invalid UTF-8 and control characters: more than one, and more than a twentieth of the text."""
    text = answer.text
    broken = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\n\r\t") for char in text)
    return f"{broken} broken characters in {len(text)}" if broken > 1 and broken / len(text) > 0.05 else None


# English and code compress to 0.2–0.6 of their size; text that repeats without end compresses much further. A table of
# numbers or signs may compress as far, so a text with few letters is left to the search for blocks.
_MIN_BYTES = 400
_MAX_REPETITIVE_RATIO = 0.06
_MIN_LETTERS = 0.3

# A block of text with at least this many consecutive repetitions is not a refrain. The last may be cut off.
_MIN_REPEATS = 8
_MIN_REPEATED_CHARS = 60
_LONGEST_PERIOD = 400
# Digits, signs or one letter may be a number, a rule or a row of a matrix, so they must repeat for longer, in one line.
_MIN_REPEATED_SIGNS = 2000
_LONGEST_PERIOD_OF_SIGNS = 8


def _repetition(answer: CheckedAnswer) -> str | None:
    """Find answers that end in copies of one block, and answers that compress like endless repetition."""
    text = answer.text
    encoded = text.encode(errors="replace")
    if len(encoded) >= _MIN_BYTES and sum(map(str.isalpha, text)) >= _MIN_LETTERS * len(text):
        ratio = len(zlib.compress(encoded)) / len(encoded)
        if ratio < _MAX_REPETITIVE_RATIO:
            return f"repeats itself (compresses to {ratio:.1%})"
    # An answer that loops ends in copies of one block.
    tail = text.rstrip()[-_LONGEST_PERIOD * (_MIN_REPEATS + 1) :]
    codes = np.frombuffer(tail.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for period in range(1, min(_LONGEST_PERIOD, len(codes) // (_MIN_REPEATS - 1)) + 1):
        differences = np.flatnonzero(codes[period:] != codes[:-period])
        length = len(codes) - (int(differences[-1]) + 1 if len(differences) else 0)
        block = tail[-period:]
        if len({char for char in block.lower() if char.isalpha()}) >= 2:
            least = max((_MIN_REPEATS - 1) * period + 1, _MIN_REPEATED_CHARS)
        elif period <= _LONGEST_PERIOD_OF_SIGNS and "\n" not in block:
            least = _MIN_REPEATED_SIGNS
        else:
            continue
        if length >= least:
            return f"repeats itself ({length // period} times {block.strip()[:60]!r})"
    return None


_MIN_PAIRS = 50
# Bits. Windows of text and code in 25 languages with Latin letters stay below 5.4, letters drawn at random have 6.4.
_MAX_BITS_A_PAIR = 5.7

# Row a, column b: the bits of letter b after letter a, minus 1, at most 9, averaged over text in 25 languages and code.
_LETTER_PAIR_TABLE = """
54338646454232648232447855
16772888249276289346288949
28572892273486279443499976
17861867276665269456368965
45445547464332757223557575
28753379188478179354399969
26861754287463369344268958
19861997266566289573368959
45343547654332358423649685
16951988396574269736278997
16661764295475269433376969
16741567156365269844369857
13871879287646239756389979
28422525265675389832469957
54436546454331549233445885
18562874397376249244389949
39756989599387677563082989
16541746265545268543357956
28472775283466348731368955
18781883286676259344367757
33443647354332549223667764
19781979288685289568599958
17752854187574379448695758
34352476296648429761598446
25443757475433329432466766
16751965277554378666366945
"""
_LETTER_PAIR_BITS = _LETTER_PAIR_TABLE.split()

# Keys, hashes and encoded data have digits or signs between their letters. Acronyms are not pronounceable.
_NO_WORD = re.compile(r"[0-9+/=_\\<>{}\[\]%&$#@^|~]|^[A-Z]{2,5}$")


def _random_letters(answer: CheckedAnswer) -> str | None:
    """Find Latin letters whose letter pairs lack the frequencies that languages and code have."""
    for window in _windows(answer.text):
        bits = pairs = 0
        words = [word for word in window.split() if not _NO_WORD.search(word)]
        plain = unicodedata.normalize("NFKD", " ".join(words).lower())
        plain = "".join(char for char in plain if not unicodedata.combining(char))
        for word in re.findall(r"[a-z]{2,}", plain):
            pairs += len(word) - 1
            bits += sum(int(_LETTER_PAIR_BITS[ord(a) - 97][ord(b) - 97]) + 1 for a, b in itertools.pairwise(word))
        if pairs >= _MIN_PAIRS and bits / pairs > _MAX_BITS_A_PAIR:
            return f"random letters ({bits / pairs:.1f} bits per pair of letters): {window[:60]!r}"
    return None


# Words without punctuation; in every listed language, at least a twentieth of them are function words.
_MIN_WORDS = 30
_MIN_GRAMMAR = 0.04

_FUNCTION_WORD_LIST = """
a aber about adı af ako al ale ali all alla als also ama an and any ar are as at atau att auch auf av avec az aŭ
be been bir bu but by był būti can ce cette che come como con could cu các có của da dacă daha dalam dan dans
dapat dari das de del della dem den der des det dev değil di die dili dist dla do docs du e een egy ein eine el
elle eller els em en er es est estas este for from för für geen gibi git gli ha had han has have he her het his
hon i ich if ikke il ile ili in inte into io ir is ist it its için iš ja jak jako je jei jest kaip kaj kan kann
kao kas ke không ki ko kot kui kun kā la lai las le les li libs los lub ma mais me med meg met mit more można
muy my más na naj nav ne nebo nelze nem není new ni nicht nie niet nije nimi nincs no non not nous nu não näytä
nėra o och od oder of og olan ole on only or oraz os other our out para pas per pero più plus poate pole por
pour pro puede på při que qui s saa se she si sich sie się so som some sono su sur sus să số tai tak também te
than that the their them then there they this thể tidak tiek til till tin to trong u um uma un una und untuk up
vagy vai van ve veya voi von voor vous või võti was we wenn were what when which who wie will wir with work
would y yang yok you your yra za zu à är çok è é és în được định į że și
"""
_FUNCTION_WORDS = frozenset(_FUNCTION_WORD_LIST.split())


def _word_salad(answer: CheckedAnswer) -> str | None:
    """Find long clauses of Latin words that have almost no function words from 25 languages."""
    for clause in re.split(r"[^\w\s'’-]+|\n+|\d+", answer.text):
        words = [word for word in clause.lower().split() if any(map(str.isalpha, word))]
        is_latin = all(char.isascii() or "LATIN" in unicodedata.name(char, "") for char in clause if char.isalpha())
        if len(words) < _MIN_WORDS or not is_latin:
            continue
        share = _count_function_words(words) / len(words)
        if share < _MIN_GRAMMAR:
            return f"{len(words)} words without grammar ({share:.0%} function words): {clause.strip()[:60]!r}"
    return None


def _count_function_words(words: Iterable[str]) -> int:
    """Return how many of some lower-case words are function words in a language with Latin letters."""
    return sum(word in _FUNCTION_WORDS for word in words)


_MIN_SCRIPTS = 4
_MAX_SCRIPT_CHANGES = 0.5
_EAST_ASIAN = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO")


def _mixed_scripts(answer: CheckedAnswer) -> str | None:
    """Find windows in which neighbouring words, or letters in one word, mostly come from different scripts."""
    for window in _windows(answer.text):
        changes = steps = 0
        seen: set[str] = set()
        for clause in re.split(r"[^\w ]+|\n+|_+|\d+", window):
            # Each script of a word once where it repeats.
            found = (groupby(filter(None, map(_script_of, word))) for word in clause.split())
            scripts = [script for runs in found for script, _ in runs]
            seen.update(scripts)
            steps += max(len(scripts) - 1, 0)
            changes += sum(a != b for a, b in itertools.pairwise(scripts))
        if len(seen) >= _MIN_SCRIPTS and steps >= 8 and changes / steps > _MAX_SCRIPT_CHANGES:
            return f"{len(seen)} scripts mixed: {window[:60]!r}"
    return None


@lru_cache(maxsize=65536)
def _script_of(char: str) -> str | None:
    """Return the script of a letter, as in its Unicode name; None for other characters and rare scripts."""
    prefix = unicodedata.name(char, "").partition(" ")[0] if char.isalpha() else ""
    if prefix in _EAST_ASIAN:
        return "EAST ASIAN"
    return prefix if prefix in _LANGUAGES else None


# Letters of a script before and after the change. A letter of East Asian scripts is a syllable or a word.
_MIN_BEFORE = 30
_MIN_AFTER = 25
_MIN_BEFORE_EAST_ASIAN = 8
_MIN_AFTER_EAST_ASIAN = 12
_MIN_SHARE = 0.8
# Latin letters inside other text are code, names or quotations, unless they have a sentence's function words.
_MIN_FUNCTION_WORDS = 4
_MIN_FUNCTION_WORD_SHARE = 0.25
# A request with this many letters from a script, or that names one of its languages, asks for it.
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


def _language_switch(answer: CheckedAnswer) -> str | None:
    """Find a paragraph that continues in another script, which the request does not use.

    Languages that share a script are not distinguished.
    """
    for part in _BOUNDARIES.split(answer.text):
        change = _change_of_script(part)
        if change is not None:
            position, script = change
            if not _is_requested(script, answer.messages):
                return f"changes to {script.lower()} letters after {part[max(position - 30, 0) : position]!r}"
    return None


def _change_of_script(text: str) -> tuple[int, str] | None:
    """Return where a text changes its script for good, and to which one; None if it does not."""
    letters = [(index, script) for index, char in enumerate(text) if (script := _script_of(char)) is not None]
    scripts = [script for _, script in letters]
    if len(set(scripts)) < 2:
        return None
    runs = [(script, len(list(run))) for script, run in groupby(scripts)]
    ends = list(accumulate(length for _, length in runs))
    for (before, _), end, (after, _) in zip(runs, ends, runs[1:], strict=False):
        if end < (_MIN_BEFORE_EAST_ASIAN if before == "EAST ASIAN" else _MIN_BEFORE):
            continue
        if len(scripts) - end < (_MIN_AFTER_EAST_ASIAN if after == "EAST ASIAN" else _MIN_AFTER):
            break
        if min(scripts[:end].count(before) / end, scripts[end:].count(after) / (len(scripts) - end)) < _MIN_SHARE:
            continue
        position = letters[end][0]
        words = re.findall(r"\w+", text[position:].lower()) if after == "LATIN" else []
        least = max(_MIN_FUNCTION_WORDS, _MIN_FUNCTION_WORD_SHARE * len(words))
        if after != "LATIN" or _count_function_words(words) >= least:
            return position, after
    return None


def _is_requested(script: str, messages: Messages) -> bool:
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else str(content or "")
        if _ANY_LANGUAGE.search(text) or _NAMED[script].search(text):
            return True
        if sum(_script_of(char) == script for char in text) >= _MIN_REQUESTED:
            return True
    return False


CHECKS: dict[str, Callable[[CheckedAnswer], str | None]] = {
    "wrong_toolcall": _wrong_tool_call,
    "broken_characters": _broken_characters,
    "repetition": _repetition,
    "random_letters": _random_letters,
    "word_salad": _word_salad,
    "mixed_scripts": _mixed_scripts,
    "language_switch": _language_switch,
}
"""The checks by their names in `rollout.compute_madness_checklist`, in the order in which they run.

A check returns a description of the fault with an excerpt, or None if the answer has none.
"""

NONSENSE = ("broken_characters", "repetition", "random_letters", "word_salad", "mixed_scripts")
"""The checks that the name `nonsense` selects."""

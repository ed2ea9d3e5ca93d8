"""Detection of degenerate model output: repetition, random letters or words, broken characters, malformed tool calls.

The checks are rules with wide margins, not a language model. They look at windows of an answer, so that an answer which
starts well and then degenerates is found. `tests/model_tuner/test_degenerate_output.py` measures hits and false alarms.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from astuner.model_tuner.codec import ParsedAnswer

# English and code compress to 0.2–0.6 of their size; text that repeats without end compresses much further.
_MIN_BYTES = 400
_MAX_REPETITIVE_RATIO = 0.06
_MIN_BROKEN_SHARE = 0.05

# A block of text with at least this many consecutive repetitions is not a refrain. The last may be cut off.
_MIN_REPEATS = 8
_MIN_REPEATED_CHARS = 60
_LONGEST_PERIOD = 400

# Letters of a window in which the frequencies of pairs are stable.
_WINDOW = 400
_MIN_PAIRS = 50
# Bits. Windows of text and code in 25 languages with Latin letters stay below 5.4, letters drawn at random have 6.4.
_MAX_BITS_A_PAIR = 5.7

# Words without punctuation, of which at least a twentieth are function words in every language of the list.
_MIN_WORDS = 30
_MIN_FUNCTION_WORDS = 0.04

_MIN_SCRIPTS = 4
_MAX_SCRIPT_CHANGES = 0.5

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


def find_degenerate_output(text: str, answer: ParsedAnswer, checklist: Sequence[str]) -> str | None:
    """Return a description of the fault of a completion, or None.

    Args:
        text: the text of the completion.
        answer: the parsed completion.
        checklist: the checks to run. `nonsense` detects repetition, random letters, words without grammar, mixed
            scripts and broken characters (invalid UTF-8, control characters); `wrong_toolcall` detects tool calls that
            cannot be parsed.
    """
    if "wrong_toolcall" in checklist and answer.malformed:
        return f"malformed tool call: {answer.malformed[0][:200]!r}"
    if not text or "nonsense" not in checklist:
        return None
    return _broken_characters(text) or _repetition(text) or _random_letters(text) or _word_salad(text) or _scripts(text)


def _broken_characters(text: str) -> str | None:
    broken = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\n\r\t") for char in text)
    if broken > 1 and broken / len(text) > _MIN_BROKEN_SHARE:
        return f"{broken} broken characters in {len(text)}"
    return None


def _repetition(text: str) -> str | None:
    encoded = text.encode(errors="replace")
    if len(encoded) >= _MIN_BYTES:
        ratio = len(zlib.compress(encoded)) / len(encoded)
        if ratio < _MAX_REPETITIVE_RATIO:
            return f"repeats itself (compresses to {ratio:.1%})"
    # At its end, an answer that loops consists of copies of one block.
    tail = text.rstrip()[-_LONGEST_PERIOD * (_MIN_REPEATS + 1) :]
    codes = np.frombuffer(tail.encode("utf-32-le"), dtype=np.uint32)
    for period in range(1, min(_LONGEST_PERIOD, len(codes) // (_MIN_REPEATS - 1)) + 1):
        differences = np.flatnonzero(codes[period:] != codes[:-period])
        length = len(codes) - (int(differences[-1]) + 1 if len(differences) else 0)
        block = tail[-period:]
        is_text = len({char for char in block.lower() if char.isalpha()}) >= 2
        if is_text and length >= max((_MIN_REPEATS - 1) * period + 1, _MIN_REPEATED_CHARS):
            return f"repeats itself ({length // period} times {block.strip()[:60]!r})"
    return None


def _windows(text: str) -> Iterator[str]:
    """Yield overlapping windows that cover a text."""
    for start in range(0, max(len(text) - _WINDOW // 2, 1), _WINDOW // 2):
        yield text[start : start + _WINDOW]


def _random_letters(text: str) -> str | None:
    for window in _windows(text):
        bits = pairs = 0
        # Keys, hashes and encoded data have digits or signs between their letters.
        words = [word for word in window.split() if not re.search(r"[0-9+/=_\\<>{}\[\]%&$#@^|~]", word)]
        plain = unicodedata.normalize("NFKD", " ".join(words).lower())
        plain = "".join(char for char in plain if not unicodedata.combining(char))
        for word in re.findall(r"[a-z]{2,}", plain):
            pairs += len(word) - 1
            bits += sum(int(_LETTER_PAIR_BITS[ord(a) - 97][ord(b) - 97]) + 1 for a, b in itertools.pairwise(word))
        if pairs >= _MIN_PAIRS and bits / pairs > _MAX_BITS_A_PAIR:
            return f"random letters ({bits / pairs:.1f} bits per pair of letters): {window[:60]!r}"
    return None


def _word_salad(text: str) -> str | None:
    for clause in re.split(r"[^\w\s'’-]+|\n+|\d+", text):
        words = clause.lower().split()
        is_latin = all(char.isascii() or "LATIN" in unicodedata.name(char, "") for char in clause if char.isalpha())
        if len(words) < _MIN_WORDS or not is_latin:
            continue
        share = sum(word in _FUNCTION_WORDS for word in words) / len(words)
        if share < _MIN_FUNCTION_WORDS:
            return f"words without grammar ({len(words)} words, {share:.0%} function words): {clause.strip()[:60]!r}"
    return None


def _scripts(text: str) -> str | None:
    """Return a fault if the letters of neighbouring words, or of one word, are of many scripts."""
    for window in _windows(text):
        changes = steps = 0
        seen: set[str] = set()
        for clause in re.split(r"[^\w ]+|\n+|_+|\d+", window):
            scripts = [script for word in clause.split() for script in _word_scripts(word)]
            seen.update(scripts)
            steps += max(len(scripts) - 1, 0)
            changes += sum(a != b for a, b in itertools.pairwise(scripts))
        if len(seen) >= _MIN_SCRIPTS and steps >= 8 and changes / steps > _MAX_SCRIPT_CHANGES:
            return f"{len(seen)} scripts mixed: {window[:60]!r}"
    return None


def _word_scripts(word: str) -> list[str]:
    """Return the scripts of a word's letters, each once where it repeats."""
    scripts: list[str] = []
    for char in word:
        name = unicodedata.name(char, "") if char.isalpha() else ""
        prefix = name.partition(" ")[0]
        script = "EAST ASIAN" if prefix in _EAST_ASIAN else prefix
        if (script == "EAST ASIAN" or script in _SCRIPTS) and scripts[-1:] != [script]:
            scripts.append(script)
    return scripts

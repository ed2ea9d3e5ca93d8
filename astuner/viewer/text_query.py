"""Queries of the text search: syntax, matching, and excerpts of the texts with the matches."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

# Writing systems without spaces between words, in which each character is a word here, and pictograms, which SQLite
# ignores: Thai to Burmese, Khmer, kana, Han, Hangul syllables; arrows to dingbats, and emoji.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_PICTOGRAMS = "\u2190-\u2bff\U0001f000-\U0001faff"
_SINGLE = re.compile(f"[{_UNSPACED}\U00020000-\U0003ffff{_PICTOGRAMS}]")
_IS_PICTOGRAM = re.compile(f"[{_PICTOGRAMS}]")
_PICTOGRAM_WORD = re.compile("emoji([0-9a-f]{4,5})")
_TERM = re.compile(r'"([^"]*)"?|(\S+)')
_WORD = re.compile(r"[^\W_]+")
# Characters of an excerpt before and after the first match.
_BEFORE, _AFTER = 60, 140
_MAX_TERMS = 20
_MAX_QUERY = 400


@dataclass(frozen=True, slots=True)
class Term:
    """A word or a phrase of a query.

    Attributes:
        words: Its words, at least one.
        is_prefix: Whether the last word may be the beginning of a longer one.
    """

    words: tuple[str, ...]
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class TextQuery:
    """A query of the text search.

    Attributes:
        text: The query without surrounding spaces.
        terms: The terms, each of which must occur in the episode. Empty if the query has no letter, digit or pictogram.
    """

    text: str
    terms: tuple[Term, ...]

    def match_expression(self, column: str | None) -> str:
        """Return the query in the syntax of FTS5, restricted to a column or None for all. There must be terms."""
        # Words consist of letters and digits, so quotation marks make every one of them a string of FTS5.
        parts = [f'"{" ".join(term.words)}"{"*" if term.is_prefix else ""}' for term in self.terms]
        expression = " AND ".join(parts)
        return expression if column is None else f"{{{column}}} : ({expression})"


def parse_query(text: str) -> TextQuery:
    """Parse the query of a user. Every text is a valid query.

    Words must all occur. A phrase stands in quotation marks, `word*` matches beginnings of words, and punctuation
    between letters makes a phrase: `1+2` matches 1 followed by 2.
    """
    clean = text.strip()[:_MAX_QUERY]
    terms = []
    for phrase, bare in _TERM.findall(clean):
        words = tuple(_WORD.findall(split_characters(phrase or bare)))
        if words:
            terms.append(Term(words, is_prefix=bare.endswith("*") and bare[-2:-1].isalnum()))
    quoted = re.fullmatch(r'"([^"]+)"?', clean)
    return TextQuery(quoted[1] if quoted else clean, tuple(terms[:_MAX_TERMS]))


def split_characters(text: str) -> str:
    """Return a text in which SQLite's tokenizer finds characters that are words by themselves, such as CJK."""
    if text.isascii():
        return text

    def separate(match: re.Match[str]) -> str:
        # SQLite has no tokens for symbols, so they become words of letters and digits.
        return f" emoji{ord(match[0]):x} " if _IS_PICTOGRAM.match(match[0]) else f" {match[0]} "

    return _SINGLE.sub(separate, text)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a text with matches.

    Attributes:
        role: Who wrote the text.
        parts: The text in parts, and whether each part matches.
    """

    role: str
    parts: tuple[tuple[str, bool], ...]


def excerpt(
    query: TextQuery, texts: Sequence[tuple[str, str, str]], kind: str | None, *, by_words: bool
) -> Excerpt | None:
    """Return the first text that matches most of the query, around its first match; None if no text matches.

    Args:
        query: The query.
        texts: Kind, role and text of each text of the episode.
        kind: The kind of the texts that were searched; None for all.
        by_words: Whether words were searched, and not a part of the text.
    """
    patterns = [_pattern(term) for term in query.terms] if by_words else [re.compile(re.escape(fold(query.text)))]
    best: tuple[int, str, str, list[tuple[int, int]]] | None = None
    for own_kind, role, text in texts:
        if kind is not None and own_kind != kind:
            continue
        folded = fold(text)
        found = [match.span() for pattern in patterns if (match := pattern.search(folded))]
        if found and (best is None or len(found) > best[0]):
            best = len(found), role, text, found
            if len(found) == len(patterns):
                break
    if best is None:
        return None
    _, role, text, found = best
    start = max(0, min(found)[0] - _BEFORE)
    end = min(len(text), min(found)[1] + _AFTER)
    folded = fold(text)[start:end]
    spans = sorted(match.span() for pattern in patterns for match in pattern.finditer(folded) if match.end())
    parts: list[tuple[str, bool]] = [("…", False)] if start else []
    place = 0
    for begin, stop in spans:
        if begin >= place:
            parts += [(text[start + place : start + begin], False), (text[start + begin : start + stop], True)]
            place = stop
    parts += [(text[start + place : end], False)] + ([("…", False)] if end < len(text) else [])
    return Excerpt(role, tuple((part, is_match) for part, is_match in parts if part))


def fold(text: str) -> str:
    """Return a text in lower case without accents, as the search compares it, with the same number of characters."""
    return text.lower() if text.isascii() else "".join(map(_fold_character, text))


def _fold_character(character: str) -> str:
    parts = unicodedata.normalize("NFD", character)
    # A letter and its accents; Hangul syllables consist of several letters.
    base = parts[0] if len(parts) > 1 and unicodedata.combining(parts[1]) else character
    lower = base.lower()
    return lower if len(lower) == 1 else base


def _pattern(term: Term) -> re.Pattern[str]:
    """Return the regular expression of a term for a folded text."""
    words = [_PICTOGRAM_WORD.sub(lambda match: chr(int(match[1], 16)), word) for word in term.words]
    left, right = (r"(?<![^\W_])", r"(?![^\W_])")
    # Characters that are words by themselves have no boundaries.
    if _SINGLE.fullmatch(words[0]):
        left = ""
    if term.is_prefix or _SINGLE.fullmatch(words[-1]):
        right = r"[^\W_]*" if term.is_prefix else ""
    return re.compile(left + r"[\W_]*?".join(re.escape(fold(word)) for word in words) + right)

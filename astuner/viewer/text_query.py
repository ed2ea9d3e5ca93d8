"""The text search: episodes' texts, read without their tokens, and queries with syntax, matching and excerpts."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.episode_file import read_episode_document
from astuner.run_record.episodes import brief_answer, message_text, without_blocks

# Searched characters of an episode. If it has more, the beginning and the end of each text are searched.
_MAX_TEXT = 100_000
# Characters that separate the texts where they are stored.
_SEPARATORS = re.compile("[\0\x1e\x1f]")

Kind = str
"""`answers` for what models generated, `errors` for errors and judges, `prompts` for all other messages."""
KINDS: tuple[Kind, ...] = ("prompts", "answers", "errors")


@dataclass(frozen=True, slots=True)
class EpisodeTexts:
    """The distinct texts of an episode.

    Attributes:
        texts: The kind, the role (such as `user`) and the text of each.
        answer: The answer, as in the record's index.
        is_cut: Whether the texts exceed the searched length, so that parts of them are not searched.
    """

    texts: tuple[tuple[Kind, str, str], ...]
    answer: str
    is_cut: bool = False

    def of_kind(self, kind: Kind) -> str:
        """Return all texts of one kind."""
        return "\n".join(text for text_kind, _, text in self.texts if text_kind == kind)


def pack(texts: EpisodeTexts) -> str:
    """Return the texts as one string."""
    return "\x1e".join("\x1f".join(parts) for parts in texts.texts)


def unpack(packed: str) -> list[tuple[Kind, str, str]]:
    """Return the `texts` of a string that `pack` returned."""
    parts = (item.split("\x1f") for item in packed.split("\x1e") if item)
    return [(kind, role, text) for kind, role, text in parts]


def read_episode_texts(path: Path) -> EpisodeTexts:
    """Read the texts of an episode's file; `RecordError` if the file cannot be read or holds no episode."""
    document = read_episode_document(path)
    try:
        found = list(dict.fromkeys(_texts(document["episode"])))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} holds an incomplete episode: {error}") from error
    answers = [text for kind, role, text in found if kind == "answers" and role != "thinking"]
    final = [text for _, role, text in found if role == "final answer"]
    answer = brief_answer((final or answers or [""])[-1])
    total = sum(len(text) for _, _, text in found)
    if total <= _MAX_TEXT:
        return EpisodeTexts(tuple(found), answer)
    # Equal parts for all texts, so that a long one does not hide the others.
    half = max(50, _MAX_TEXT // len(found) // 2)
    shortened = [(kind, role, text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}")
                 for kind, role, text in found[: _MAX_TEXT // 100]]  # fmt: skip
    return EpisodeTexts(tuple(shortened), answer, is_cut=True)


def _texts(episode: Mapping[str, Any]) -> Iterator[tuple[Kind, str, str]]:
    spoken = set()
    # A call has only the messages that it does not share with an earlier call.
    for call in episode["calls"]:
        for message in call["messages"]:
            for kind, role, text in _message_texts(message):
                spoken.add(text)
                yield kind, role, text
    yield from _clean("prompts", "task", episode["task"].get("main_query"), spoken)
    final = (episode.get("metadata") or {}).get("final_answer")
    final = without_blocks(final) if isinstance(final, str) else None
    yield from _clean("answers", "final answer", final, set())
    for name in ("error", "error_traceback"):
        yield from _clean("errors", name.replace("_", " "), episode.get(name), spoken)
    judgement = episode.get("judgement")
    if isinstance(judgement, Mapping):
        yield from _clean("errors", "judge", judgement.get("explanation"), spoken)


def _message_texts(message: object) -> Iterator[tuple[Kind, str, str]]:
    if not isinstance(message, Mapping):
        yield from _clean("prompts", "?", str(message), set())
        return
    role = str(message.get("role", "?"))[:40]
    kind = "answers" if role == "assistant" else "prompts"
    for name in ("reasoning_content", "thinking"):
        yield from _clean(kind, "thinking", message.get(name), set())
    content = message.get("content")
    yield from _clean(kind, role, message_text(content), set())
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        source = function if isinstance(function, Mapping) else {"arguments": call}
        arguments = source.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
        yield from _clean(kind, "tool call", f"{source.get('name') or ''} {text}", set())


def _clean(kind: Kind, role: str, text: object, known: set[str]) -> Iterator[tuple[Kind, str, str]]:
    """Yield a text that is not empty and not known, without characters that the database cannot hold."""
    if isinstance(text, str) and text.strip() and text not in known:
        yield kind, _valid(role), _valid(text)


def _valid(text: str) -> str:
    return _SEPARATORS.sub(" ", text.encode("utf-8", "replace").decode())


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
    """A word or a phrase of a query. `is_prefix` tells whether the last word may begin a longer one."""

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
        # Words consist of letters and digits, so quotation marks make each a string in FTS5.
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
    """An excerpt with matches: who wrote the text, and its parts, each with whether it matches."""

    role: str
    parts: tuple[tuple[str, bool], ...]


def excerpt(
    query: TextQuery, texts: Sequence[tuple[str, str, str]], kind: str | None, *, by_words: bool
) -> Excerpt | None:
    """Return the first text that matches most of the query, around its first match; None if no text matches.

    Args:
        query: What was searched.
        texts: Kind, role and text of each text in the episode.
        kind: The kind of the searched texts; None for all.
        by_words: Whether words were searched, and not a part of the text.
    """
    patterns = [_pattern(term) for term in query.terms] if by_words else [re.compile(re.escape(fold(query.text)))]
    best: tuple[int, str, str, list[tuple[int, int]]] | None = None
    for text_kind, role, text in texts:
        if kind is not None and text_kind != kind:
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

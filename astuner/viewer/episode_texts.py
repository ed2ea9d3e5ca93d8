"""The texts of an episode's file, for the text search, without decoding its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.answers import brief_answer, message_text, without_blocks
from astuner.run_record.episode_file import read_episode_document

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
        return "\n".join(text for own_kind, _, text in self.texts if own_kind == kind)


def pack(texts: EpisodeTexts) -> str:
    """Return the texts as one string."""
    return "\x1e".join("\x1f".join(parts) for parts in texts.texts)


def unpack(packed: str) -> list[tuple[Kind, str, str]]:
    """Return the `texts` of a string that `pack` returned."""
    parts = (item.split("\x1f") for item in packed.split("\x1e") if item)
    return [(kind, role, text) for kind, role, text in parts]


def read_episode_texts(path: Path) -> EpisodeTexts:
    """Read the texts of an episode's file.

    Raises:
        RecordError: If the file cannot be read or holds no episode.
    """
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

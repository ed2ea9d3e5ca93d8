"""The answer of an episode."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from astuner.schema import Episode

# Longest answer in lists, in characters.
_MAX_BRIEF = 300
# Longest answer whose blocks are parsed, in characters.
_MAX_BLOCKS = 100_000


def answer_of(episode: Episode) -> str:
    """Return an episode's answer: `final_answer` in the workflow's metadata, or the text of the last LLM call.

    Empty if the episode has neither.
    """
    answer = episode.metadata.get("final_answer")
    return without_blocks(answer) if isinstance(answer, str) and answer.strip() else last_text(episode)


def without_blocks(answer: str) -> str:
    """Return the text in an answer that a workflow made with `str` from a message's content blocks.

    AgentScope's messages have such contents: `[{'type': 'text', 'text': '42'}]`. Other answers are returned as given.
    """
    if not answer.startswith("[{'type': 'text'") or len(answer) > _MAX_BLOCKS:
        return answer
    try:
        return message_text(ast.literal_eval(answer)) or answer
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # it only looks like one
        return answer


def last_text(episode: Episode) -> str:
    """Return the text of the last call's last message; empty if there is none."""
    answered = [call for call in episode.calls if call.messages]
    message = answered[-1].messages[-1] if answered else None
    return message_text(message.get("content")) if isinstance(message, Mapping) else ""


def message_text(content: object) -> str:
    """Return the text in a message's content, which is in the chat API's format."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def brief_answer(answer: str) -> str:
    """Return an answer on one line; of a long one, the beginning and the end, where conclusions stand."""
    # An answer may have megabytes.
    half = 4 * _MAX_BRIEF
    line = " ".join((answer if len(answer) <= 2 * half else f"{answer[:half]} {answer[-half:]}").split())
    kept = _MAX_BRIEF // 2
    return line if len(line) <= _MAX_BRIEF else f"{line[:kept]} … {line[-kept:]}"

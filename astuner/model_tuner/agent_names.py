"""Names for a program's agents, if the program does not say which of them calls the model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

AUTO_AGENT = "auto"
"""The agent name with which `ModelTuner.chat` takes the name from the messages."""
_HASHED_CHARACTERS = 200
_NUMBER = re.compile(r"\d+")


def agent_by_text(messages: Sequence[Mapping[str, Any]], texts: Mapping[str, str]) -> str | None:
    """Return the agent whose text is in the last user message or, if there is none, in the system prompt.

    A program often asks for a summary with a user message after the system prompt of its main agent.

    Args:
        messages: the normalised conversation.
        texts: a text for each agent.

    Returns:
        The name of the agent; None if no text is in the messages.
    """
    asked = [message for message in messages if message.get("role") == "user"][-1:]
    for part in (asked, _system_messages(messages)):
        whole = "\n".join(message["content"] or "" for message in part)
        for agent, text in texts.items():
            if text in whole:
                return agent
    return None


def agent_by_hash(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return `agent-HASH`, with a hash of the system prompt's beginning; `agent` if there is no system prompt.

    The hash is of the first line, up to 200 characters and without numbers. What follows often contains the date, the
    working folder or a list of files, which differ between episodes.
    """
    prompt = "\n".join(message["content"] or "" for message in _system_messages(messages)).strip()
    if not prompt:
        return "agent"
    start = _NUMBER.sub("", prompt.splitlines()[0][:_HASHED_CHARACTERS])
    return f"agent-{hashlib.blake2b(start.encode(errors='replace'), digest_size=4).hexdigest()}"


def _system_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [message for message in messages if message.get("role") in ("system", "developer")]

"""The distinct messages of an episode's calls, and their authors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from astuner.schema import LlmCall


class Messages:
    """The distinct messages of calls, which repeat the conversation so far.

    Attributes:
        distinct: The messages in the order in which the calls first contain them.
        of_call: Indices in `distinct` of each call's messages.
        authors: For each message of `distinct`, the index of the call that generated it; None for other messages.
        agents: For each message of `distinct`, the agent of this call; empty for other messages.
    """

    def __init__(self, calls: Sequence[LlmCall]) -> None:
        numbers: dict[int, int] = {}
        written: dict[str, int] = {}
        self.distinct: list[object] = []
        self.of_call: list[list[int]] = []
        self.authors: list[int | None] = []
        for number, call in enumerate(calls):
            indices = []
            for place, message in enumerate(call.messages):
                # The reader of a record returns one object for a message that calls share.
                if id(message) not in numbers:
                    numbers[id(message)] = len(self.distinct)
                    self.distinct.append(message)
                    self.authors.append(_author(message, number, place == len(call.messages) - 1, written))
                indices.append(numbers[id(message)])
            self.of_call.append(indices)
        self.agents = ["" if author is None else calls[author].agent_name for author in self.authors]


def conversation(calls: Sequence[LlmCall]) -> list[tuple[object, str]]:
    """Return the calls' messages without the repetitions in later calls, each with its author.

    The author is the name of the agent whose call generated the message; empty for other messages.
    """
    messages = Messages(calls)
    keys = [repr(message) for message in messages.distinct]
    seen: Counter[str] = Counter()
    emitted = []
    for indices in messages.of_call:
        in_call: Counter[str] = Counter()
        for index in indices:
            key = keys[index]
            in_call[key] += 1
            if in_call[key] > seen[key]:
                seen[key] += 1
                emitted.append((messages.distinct[index], messages.agents[index]))
    return emitted


def _author(message: object, call: int, is_last: bool, written: dict[str, int]) -> int | None:
    """Return the index of the call that generated a message in `call`; `written` has the answers so far."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return None
    # A call's last message is its answer. An agent may send a copy of the answer with its next call.
    key = repr(message)
    return written.setdefault(key, call) if is_last else written.get(key)

"""The calls of an episode so far, to find the one that a new request extends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.messages import digest
from astuner.schema import LlmCall


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's token ids.

    Attributes:
        token_ids: the ids.
        fork_cause: why it does not extend an earlier call that it should have extended.
        opening: length of the prompt that its conversation began with; None if it is that prompt.
    """

    token_ids: tuple[int, ...]
    fork_cause: str | None = None
    opening: int | None = None


@dataclass
class History:
    """Append-only record of calls, indexed by the conversation that each of them ends."""

    codec: ChatCodec
    calls: list[LlmCall] = field(default_factory=list)
    _ends: dict[bytes, dict[str, LlmCall]] = field(default_factory=dict)
    # By a conversation's first message, the length of the first prompt that began with it.
    _openings: dict[bytes, int] = field(default_factory=dict)

    def add(self, call: LlmCall, conversation: Sequence[Mapping[str, Any]]) -> None:
        """Record a call; `conversation` is its request and answer, normalised."""
        self.calls.append(call)
        chain = _chain(conversation)
        self._openings.setdefault(chain[0], len(call.prompt_ids))
        # The latest of several equal conversations wins: its tokens are as true a context as the others'.
        self._ends.setdefault(chain[-1], {})[call.tools_hash] = call

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_hash: str,
    ) -> Prompt:
        """Return the ids for a normalised request: an earlier call's own ids and the new messages', if it can be."""
        chain = _chain(messages)
        cause = None
        for known in range(len(messages) - 1, 0, -1):
            ends = self._ends.get(chain[known - 1])
            if not ends:
                continue
            if tools_hash not in ends:
                cause = "tools_changed"
                break
            bridged = self.codec.bridge(ends[tools_hash], messages, known, tools)
            if bridged is not None:
                return Prompt(bridged, opening=self._openings[chain[0]])
            cause = "template_rewrote_history"
            break
        else:
            # Only a request that carries an answer can be expected to extend one.
            if self.calls and any(message["role"] == "assistant" for message in messages):
                cause = "framework_edited_history" if chain[0] in self._openings else "system_changed"
        return Prompt(self.codec.render(messages, tools), cause, self._openings.get(chain[0]))


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return one digest a message that stands for it and all before it."""
    chain: list[bytes] = []
    running = b""
    for message in messages:
        running = hashlib.blake2b(running + digest(message), digest_size=16).digest()
        chain.append(running)
    return chain

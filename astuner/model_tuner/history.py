"""The calls of an episode so far, to find the one that a new request extends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.messages import digest
from astuner.schema import Fork, ForkCause, LlmCall


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's token ids.

    Attributes:
        token_ids: the ids.
        fork: why it does not extend an earlier call that it should have extended.
        opening: length of the prompt that its conversation began with; None if it is that prompt.
    """

    token_ids: tuple[int, ...]
    fork: Fork | None = None
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
        cause: ForkCause | None = None
        earlier, known = None, 0
        for known in range(len(messages) - 1, 0, -1):
            ends = self._ends.get(chain[known - 1])
            if not ends:
                continue
            earlier = ends.get(tools_hash)
            if earlier is None:
                cause, earlier = "tools_changed", next(reversed(ends.values()))
                break
            bridged = self.codec.bridge(earlier, messages, known, tools)
            if bridged is not None:
                return Prompt(bridged, opening=self._openings[chain[0]])
            cause = "template_rewrote_history"
            break
        else:
            # Only a request that carries an answer can be expected to extend one.
            if self.calls and any(message["role"] == "assistant" for message in messages):
                cause, earlier = (
                    "framework_edited_history" if chain[0] in self._openings else "system_changed",
                    self.calls[-1],
                )
        ids = self.codec.render(messages, tools)
        fork = self._fork(cause, earlier, ids, known) if cause and earlier else None
        return Prompt(ids, fork, self._openings.get(chain[0]))

    def _fork(self, cause: ForkCause, earlier: LlmCall, found: tuple[int, ...], message_index: int) -> Fork:
        expected = earlier.prompt_ids + earlier.completion_ids
        pairs = enumerate(zip(expected, found, strict=False))
        position = next((place for place, (a, b) in pairs if a != b), min(len(expected), len(found)))
        texts = expected[position : position + 8], found[position : position + 8]
        decode = self.codec.tokenizer.decode
        return Fork(
            cause, earlier.call_id, position, *texts, decode(list(texts[0])), decode(list(texts[1])), message_index
        )


def _chain(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return one digest a message that stands for it and all before it."""
    chain: list[bytes] = []
    running = b""
    for message in messages:
        running = hashlib.blake2b(running + digest(message), digest_size=16).digest()
        chain.append(running)
    return chain

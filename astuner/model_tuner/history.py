"""The calls of an episode so far, to find the one that a new request extends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.forks import CallIndex, Conversation, Departure, first_difference, fork
from astuner.model_tuner.messages import digest, with_reasoning
from astuner.schema import Fork, ForkCause, LlmCall


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's token ids.

    Attributes:
        token_ids: the ids.
        messages: the request's messages; where the ids extend an earlier call, with the thinking that stands in
            those ids and that the framework left out.
        fork: why it does not extend an earlier call that it should have extended.
        opening: length of the prompt that its conversation began with; None if it is that prompt.
    """

    token_ids: tuple[int, ...]
    messages: Sequence[Mapping[str, Any]]
    fork: Fork | None = None
    opening: int | None = None


@dataclass
class History:
    """Append-only record of calls, indexed by the conversation that each of them ends."""

    codec: ChatCodec
    calls: list[LlmCall] = field(default_factory=list)
    _index: CallIndex = field(init=False)
    # By a conversation, the latest call that ends it, by its tools.
    _ends: dict[bytes, dict[str, LlmCall]] = field(default_factory=dict)
    # By a conversation's first message, the length of the first prompt that began with it.
    _openings: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = CallIndex(self.codec)

    def add(self, call: LlmCall) -> None:
        """Record a call, whose messages are normalised."""
        self.calls.append(call)
        digests = [digest(message) for message in call.messages]
        chain = _chain(digests)
        self._openings.setdefault(chain[0], len(call.prompt_ids))
        # The latest of several equal conversations wins: its tokens are as true a context as the others'.
        ends = self._ends.setdefault(chain[-1], {})
        ends.pop(call.tools_hash, None)
        ends[call.tools_hash] = call
        self._index.add(call, Conversation(call.messages, digests), chain)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_hash: str,
    ) -> Prompt:
        """Return the ids for a normalised request: an earlier call's own ids and the new messages', if it can be.

        Raises:
            WorkflowError: the chat template does not take the messages.
        """
        request = Conversation(messages, [digest(message) for message in messages])
        chain = _chain(request.digests)
        opening = self._openings.get(chain[0])
        known = next((length for length in range(len(chain) - 1, 0, -1) if chain[length - 1] in self._ends), 0)
        if not known or request.answers(known):
            departure = self._index.departure(request, chain, tools)
            ids = self.codec.render(messages, tools)
            return Prompt(ids, messages, fork(self.codec, departure, ids) if departure else None, opening)
        ends = self._ends[chain[known - 1]]
        earlier = ends.get(tools_hash) or next(reversed(ends.values()))
        cause: ForkCause = "tools_changed"
        if earlier.tools_hash == tools_hash:
            told = with_reasoning(messages, earlier.messages)
            bridged = self.codec.bridge(earlier, told, known, tools)
            if bridged is not None:
                return Prompt(bridged, told, opening=opening)
            cut = self.codec.is_kept_but_for_the_cut(earlier, told, known, tools)
            cause = "truncated" if cut else "template_rewrote_history"
        ids = self.codec.render(messages, tools)
        place = first_difference(earlier.prompt_ids + earlier.completion_ids, ids)
        departure = Departure(cause, earlier, self.codec.message_at(messages, tools, place))
        return Prompt(ids, messages, fork(self.codec, departure, ids), opening)


def _chain(digests: Sequence[bytes]) -> list[bytes]:
    """Return one digest a message that stands for it and all before it."""
    chain: list[bytes] = []
    running = b""
    for one in digests:
        running = hashlib.blake2b(running + one, digest_size=16).digest()
        chain.append(running)
    return chain

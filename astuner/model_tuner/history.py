"""The calls of an episode so far, to find the one that a new request extends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.forks import CallIndex, Conversation, Departure, first_difference, fork
from astuner.model_tuner.messages import digests, thinks_alike, with_reasoning
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
    # By a conversation, the calls that end it.
    _ends: dict[bytes, list[LlmCall]] = field(default_factory=dict)
    # By a call, the length of the prompt that its conversation began with.
    _openings: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = CallIndex(self.codec)

    def add(self, call: LlmCall, opening: int | None) -> None:
        """Record a call, whose messages are normalised; `opening` is its prompt's."""
        self.calls.append(call)
        self._openings[call.call_id] = len(call.prompt_ids) if opening is None else opening
        conversation = Conversation(call.messages, digests(call.messages))
        chain = _chain(conversation.digests)
        self._ends.setdefault(chain[-1], []).append(call)
        self._index.add(call, conversation, chain)

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
        request = Conversation(messages, digests(messages))
        chain = _chain(request.digests)
        known = next((length for length in range(len(chain) - 1, 0, -1) if chain[length - 1] in self._ends), 0)
        if not known or request.answers(known):
            return self._forked(messages, tools, self._index.departure(request, chain, tools))
        earlier, cause = self._to_extend(self._ends[chain[known - 1]], messages, tools_hash)
        if cause is None:
            told = with_reasoning(messages, earlier.messages)
            bridged = self.codec.bridge(earlier, told, known, tools)
            if bridged is not None:
                return Prompt(bridged, told, opening=self._openings[earlier.call_id])
            cut = self.codec.is_kept_but_for_the_cut(earlier, told, known, tools)
            cause = "truncated" if cut else "template_rewrote_history"
        return self._forked(messages, tools, Departure(cause, earlier, None))

    @staticmethod
    def _to_extend(
        ends: Sequence[LlmCall], messages: Sequence[Mapping[str, Any]], tools_hash: str
    ) -> tuple[LlmCall, ForkCause | None]:
        """Return which of the calls that end a conversation a request continues, and what speaks against it.

        The latest of several wins: its tokens are as true a context as the others'.
        """
        for call in reversed(ends):
            if call.tools_hash == tools_hash and thinks_alike(messages, call.messages):
                return call, None
        same_tools = [call for call in ends if call.tools_hash == tools_hash]
        return (same_tools[-1], "framework_edited_history") if same_tools else (ends[-1], "tools_changed")

    def _forked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        departure: Departure | None,
    ) -> Prompt:
        """Return a request's own rendering."""
        ids = self.codec.render(messages, tools)
        if departure is None:
            return Prompt(ids, messages)
        if departure.message_index is None:
            earlier = departure.call.prompt_ids + departure.call.completion_ids
            index = self.codec.message_at(messages, tools, first_difference(earlier, ids))
            departure = replace(departure, message_index=index)
        return Prompt(ids, messages, fork(self.codec, departure, ids), self._openings[departure.call.call_id])


def _chain(digests: Sequence[bytes]) -> list[bytes]:
    """Return one digest a message that stands for it and all before it."""
    chain: list[bytes] = []
    running = b""
    for one in digests:
        running = hashlib.blake2b(running + one, digest_size=16).digest()
        chain.append(running)
    return chain

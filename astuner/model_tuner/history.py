"""The calls of an episode so far, and the search for the call that a new request extends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.forks import CallIndex, Conversation, Divergence, first_difference, make_fork
from astuner.model_tuner.messages import digests, has_same_reasoning, with_reasoning
from astuner.schema import Fork, ForkCause, LlmCall


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        token_ids: the ids.
        messages: the messages of the request. If the ids extend an earlier call, they include the thinking that those
            ids contain and that the framework left out.
        fork: why the prompt does not extend an earlier call that it should have extended; None if it does.
        first_prompt_len: length of the first prompt of its conversation; None if this is the first prompt.
    """

    token_ids: tuple[int, ...]
    messages: Sequence[Mapping[str, Any]]
    fork: Fork | None = None
    first_prompt_len: int | None = None


@dataclass
class History:
    """Append-only record of calls, indexed by conversation."""

    codec: ChatCodec
    calls: list[LlmCall] = field(default_factory=list)
    _index: CallIndex = field(init=False)
    # The calls whose request and answer are a conversation, by the digest of the conversation.
    _calls_by_conversation: dict[bytes, list[LlmCall]] = field(default_factory=dict)
    # The length of the first prompt of a call's conversation, by call id.
    _first_prompt_lens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = CallIndex(self.codec)

    def add(self, call: LlmCall, first_prompt_len: int | None) -> None:
        """Add a call with normalised messages; `first_prompt_len` is that of its `Prompt`."""
        self.calls.append(call)
        self._first_prompt_lens[call.call_id] = len(call.prompt_ids) if first_prompt_len is None else first_prompt_len
        conversation = Conversation(call.messages, digests(call.messages))
        chain = _chain(conversation.digests)
        self._calls_by_conversation.setdefault(chain[-1], []).append(call)
        self._index.add(call, conversation, chain)

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_hash: str,
    ) -> Prompt:
        """Return the prompt of a normalised request.

        If possible, the ids are those of an earlier call, followed by those of the new messages.

        Raises:
            WorkflowError: the chat template rejects the messages.
        """
        request = Conversation(messages, digests(messages))
        chain = _chain(request.digests)
        lengths = range(len(chain) - 1, 0, -1)
        n_covered = next((length for length in lengths if chain[length - 1] in self._calls_by_conversation), 0)
        if not n_covered or request.answers(n_covered):
            return self._render_fork(messages, tools, self._index.find_divergence(request, chain, tools))
        earlier, cause = self._call_to_extend(self._calls_by_conversation[chain[n_covered - 1]], messages, tools_hash)
        if cause is None:
            complete = with_reasoning(messages, earlier.messages)
            bridged = self.codec.bridge(earlier, complete, n_covered, tools)
            if bridged is not None:
                return Prompt(bridged, complete, first_prompt_len=self._first_prompt_lens[earlier.call_id])
            truncated = self.codec.is_truncation_only_obstacle(earlier, complete, n_covered, tools)
            cause = "truncated" if truncated else "template_rewrote_history"
        return self._render_fork(messages, tools, Divergence(cause, earlier, None))

    @staticmethod
    def _call_to_extend(
        calls: Sequence[LlmCall], messages: Sequence[Mapping[str, Any]], tools_hash: str
    ) -> tuple[LlmCall, ForkCause | None]:
        """Return the call of one conversation that a request continues, and the cause if it cannot be extended.

        Of several calls, this is the latest; the tokens of all of them are equally valid as context.
        """
        for call in reversed(calls):
            if call.tools_hash == tools_hash and has_same_reasoning(messages, call.messages):
                return call, None
        same_tools = [call for call in calls if call.tools_hash == tools_hash]
        return (same_tools[-1], "framework_edited_history") if same_tools else (calls[-1], "tools_changed")

    def _render_fork(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        divergence: Divergence | None,
    ) -> Prompt:
        """Return the prompt of a request that does not extend a call: its rendering."""
        ids = self.codec.render(messages, tools)
        if divergence is None:
            return Prompt(ids, messages)
        if divergence.message_index is None:
            earlier = divergence.call.prompt_ids + divergence.call.completion_ids
            index = self.codec.message_at(messages, tools, first_difference(earlier, ids))
            divergence = replace(divergence, message_index=index)
        first_prompt_len = self._first_prompt_lens[divergence.call.call_id]
        return Prompt(ids, messages, make_fork(self.codec, divergence, ids), first_prompt_len)


def _chain(digests: Sequence[bytes]) -> list[bytes]:
    """Return, for each message, a digest of it and all messages before it."""
    chain: list[bytes] = []
    running = b""
    for digest in digests:
        running = hashlib.blake2b(running + digest, digest_size=16).digest()
        chain.append(running)
    return chain

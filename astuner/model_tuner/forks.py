"""Which earlier call a request should have extended, and what kept it from that (see `ForkCause`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner.context_tracker import encode_ids, shared_prefix_length
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.messages import digest
from astuner.schema import Fork, ForkCause, LlmCall

_INSTRUCTING = ("system", "developer")
_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request, or a call's request and answer: normalised messages, with a digest of each."""

    messages: Sequence[Mapping[str, Any]]
    digests: Sequence[bytes]

    def answers(self, start: int = 0) -> list[int]:
        """Return the places from `start` on where the assistant speaks."""
        return [place for place in range(start, len(self.messages)) if self.messages[place]["role"] == "assistant"]

    def body(self) -> int:
        """Return the place of the first message that is no system message (0 or 1)."""
        return int(self.messages[0]["role"] in _INSTRUCTING)


@dataclass(frozen=True, slots=True)
class _Recorded:
    call: LlmCall
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Departure:
    """Where and why a request leaves the call that it should have extended.

    Attributes:
        cause, call: as in `Fork`.
        message_index: as in `Fork`; None where the messages are the same, so that only the tokens tell.
    """

    cause: ForkCause
    call: LlmCall
    message_index: int | None


@dataclass
class CallIndex:
    """The calls of an episode, by every beginning of their conversations and by what was answered in them.

    Recording and asking take time in proportion to the conversation's messages, whatever the number of calls.
    """

    codec: ChatCodec
    # By the digest of a conversation's beginning, the latest call that begins so.
    _beginnings: dict[bytes, _Recorded] = field(default_factory=dict)
    # By an answer, with what it answers to or with the first message: the latest call that gave it.
    _answers: dict[tuple[bytes, bytes], _Recorded] = field(default_factory=dict)

    def add(self, call: LlmCall, conversation: Conversation, chain: Sequence[bytes]) -> None:
        """Record a call; `chain` has a digest of each beginning of its conversation."""
        recorded = _Recorded(call, conversation)
        self._beginnings.update(dict.fromkeys(chain, recorded))
        self._answers.update(dict.fromkeys(_anchors(conversation, len(chain) - 1), recorded))

    def shared(self, chain: Sequence[bytes]) -> int:
        """Return the length of the longest beginning that a request has in common with any call."""
        return next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._beginnings), 0)

    def departure(
        self, request: Conversation, chain: Sequence[bytes], tools: Sequence[Mapping[str, Any]] | None
    ) -> Departure | None:
        """Return how a request that extends no call leaves the one that it continues.

        That is the call with which it shares the longest beginning or, where it shares no more than a system
        message, the one that gave the last answer in it that the model gave.

        Returns:
            None where it continues no conversation, or leaves none: it holds no answer after what it shares.
        """
        shared = self.shared(chain)
        answers = request.answers(shared)
        if not answers:
            return None
        if shared > request.body():
            earlier: _Recorded | None = self._beginnings[chain[shared - 1]]
        else:
            keys = (key for place in reversed(answers) for key in _anchors(request, place))
            earlier = next((self._answers[key] for key in keys if key in self._answers), None)
        if earlier is None:
            return None
        told = earlier.conversation
        pairs = zip(request.digests, told.digests, strict=False)
        index = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), len(told.digests))
        # What only follows the whole earlier conversation is welcome; an answer in it that the model never gave is not.
        index = min(place for place in answers if place >= index) if index == len(told.digests) else index
        cause = self._cause(request, told, index, answers[-1] + 1, tools)
        return Departure(cause, earlier.call, index)

    def _cause(
        self,
        request: Conversation,
        told: Conversation,
        index: int,
        history: int,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> ForkCause:
        """Return why `request.messages[:history]` is not as in the conversation `told` from `index` on."""
        body, earlier_body = request.body(), told.body()
        if request.digests[:body] != told.digests[:earlier_body]:
            rest = request.digests[body:history]
            if (body and earlier_body) or rest == told.digests[earlier_body : earlier_body + len(rest)]:
                return "system_changed"
        left = iter(told.digests)
        if all(message in left for message in request.digests[:history]):
            return "truncated"
        if index < len(told.messages) and self._is_retold(request.messages[: index + 1], told, index, tools):
            return "retokenised_by_client"
        return "framework_edited_history"

    def _is_retold(
        self,
        messages: Sequence[Mapping[str, Any]],
        told: Conversation,
        index: int,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> bool:
        """Whether the last of `messages` says what the answer `told.messages[index]` says, in another form."""
        mine, theirs = messages[-1], told.messages[index]
        if not mine["role"] == theirs["role"] == "assistant":
            return False
        if digest({**mine, "content": _squeezed(mine["content"])}) == digest(
            {**theirs, "content": _squeezed(theirs["content"])}
        ):
            return True
        speaker = next((self._answers[key] for key in _anchors(told, index) if key in self._answers), None)
        if speaker is None:
            return False
        said = _squeezed(self.codec.said(speaker.call))
        if not mine.get("tool_calls") and _squeezed(mine["content"]) == said:
            return True
        written = _squeezed(self.codec.written(messages, tools) or "")
        # The rendering closes the turn; nothing else may follow what was said.
        ends = {_squeezed(self.codec.decode([token])) for token in self.codec.stop_token_ids}
        return bool(said) and any(written == said + end for end in ("", *ends))


def fork(codec: ChatCodec, departure: Departure, found: Sequence[int]) -> Fork | None:
    """Return where the ids `found` part from those of the call; None where they extend it after all."""
    assert departure.message_index is not None
    expected = departure.call.prompt_ids + departure.call.completion_ids
    position = first_difference(expected, found)
    if position == len(expected):
        return None
    texts = tuple(expected[position : position + _SHOWN_TOKENS]), tuple(found[position : position + _SHOWN_TOKENS])
    return Fork(
        departure.cause,
        departure.call.call_id,
        position,
        *texts,
        codec.decode(texts[0]),
        codec.decode(texts[1]),
        departure.message_index,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the first place at which two sequences differ, or where the shorter ends."""
    return shared_prefix_length(encode_ids(left), encode_ids(right))


def _anchors(conversation: Conversation, place: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys of an answer, the most telling first; many an agent says the same short answer."""
    answer = conversation.digests[place]
    if place:
        yield conversation.digests[place - 1], answer
        yield conversation.digests[0], answer


def _squeezed(text: object) -> str:
    return "".join(str(text).split())

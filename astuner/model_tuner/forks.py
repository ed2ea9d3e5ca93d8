"""Detection of forks: which earlier call a request should have extended, and why it does not (see `ForkCause`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from astuner.context_tracker.packing import encode_ids, shared_prefix_length
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.messages import message_digest
from astuner.schema import Fork, ForkCause, LlmCall, Messages, Tools

_SYSTEM_ROLES = ("system", "developer")
_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """The normalised messages in a request, or in a call's request and answer, with a digest for each message."""

    messages: Messages
    digests: Sequence[bytes]

    def answers(self, start: int = 0) -> list[int]:
        """Return the indices, from `start` on, of the assistant's messages."""
        return [index for index in range(start, len(self.messages)) if self.messages[index]["role"] == "assistant"]

    def body_start(self) -> int:
        """Return the index of the first message after the system message (0 or 1)."""
        return int(self.messages[0]["role"] in _SYSTEM_ROLES)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The point at which a request differs from the call that it should have extended, and the cause.

    Attributes:
        cause, call: as in `Fork`.
        message_index: as in `Fork`; None if the messages are the same and only the tokens differ.
    """

    cause: ForkCause
    call: LlmCall
    message_index: int | None


@dataclass
class CallIndex:
    """An index of an episode's calls by conversation prefix and by answer.

    `add` and `find_divergence` take time proportional to the number of messages, not calls.
    """

    codec: ChatCodec
    # The latest call with a conversation prefix, by the digest of the prefix.
    _by_prefix: dict[bytes, tuple[LlmCall, Conversation]] = field(default_factory=dict)
    # The latest call that gave an answer, by two digests: the answer's, and that of the message before it or the first.
    _by_answer: dict[tuple[bytes, bytes], tuple[LlmCall, Conversation]] = field(default_factory=dict)

    def add(self, call: LlmCall, conversation: Conversation, chain: Sequence[bytes]) -> None:
        """Add a call; `chain` has a digest for each prefix of its conversation."""
        indexed = call, conversation
        self._by_prefix.update(dict.fromkeys(chain, indexed))
        self._by_answer.update(dict.fromkeys(_answer_keys(conversation, len(chain) - 1), indexed))

    def find_divergence(self, request: Conversation, chain: Sequence[bytes], tools: Tools | None) -> Divergence | None:
        """Return how a request that does not extend any call differs from the call that it continues.

        It continues the call with which it shares the longest prefix. If it shares no more than a system message, it
        continues the call that gave the last of the request's answers that come from the model.

        Returns:
            The divergence; None if the request continues no call, or has no answer after the shared prefix.
        """
        shared = next((length for length in range(len(chain), 0, -1) if chain[length - 1] in self._by_prefix), 0)
        answers = request.answers(shared)
        if not answers:
            return None
        if shared > request.body_start():
            earlier: tuple[LlmCall, Conversation] | None = self._by_prefix[chain[shared - 1]]
        else:
            keys = (key for index in reversed(answers) for key in _answer_keys(request, index))
            earlier = next((self._by_answer[key] for key in keys if key in self._by_answer), None)
        if earlier is None:
            return None
        call, previous = earlier
        pairs = zip(request.digests, previous.digests, strict=False)
        difference = next((index for index, (new, old) in enumerate(pairs) if new != old), len(previous.digests))
        # New messages may follow the whole earlier conversation, but not an answer that the model never gave.
        if difference == len(previous.digests):
            difference = min(index for index in answers if index >= difference)
        cause = self._cause(request, previous, difference, answers[-1] + 1, tools)
        return Divergence(cause, call, difference)

    def _cause(
        self, request: Conversation, previous: Conversation, index: int, history: int, tools: Tools | None
    ) -> ForkCause:
        """Return why `request.messages[:history]` differs from the conversation `previous` from `index` on."""
        body, previous_body = request.body_start(), previous.body_start()
        if request.digests[:body] != previous.digests[:previous_body]:
            rest = request.digests[body:history]
            if (body and previous_body) or rest == previous.digests[previous_body : previous_body + len(rest)]:
                return "system_changed"
        # True if the request's messages are a subsequence of the previous ones: `in` consumes the iterator.
        remaining = iter(previous.digests)
        if all(message in remaining for message in request.digests[:history]):
            return "truncated"
        if index < len(previous.messages) and self._is_reworded(request.messages[: index + 1], previous, index, tools):
            return "retokenised_by_client"
        return "framework_edited_history"

    def _is_reworded(self, messages: Messages, previous: Conversation, index: int, tools: Tools | None) -> bool:
        """Return whether the last of `messages` is the answer `previous.messages[index]` in another form."""
        new, old = messages[-1], previous.messages[index]
        if not new["role"] == old["role"] == "assistant":
            return False
        if message_digest({**new, "content": _without_whitespace(new["content"])}) == message_digest(
            {**old, "content": _without_whitespace(old["content"])}
        ):
            return True
        source = next((self._by_answer[key] for key in _answer_keys(previous, index) if key in self._by_answer), None)
        if source is None:
            return False
        completion = _without_whitespace(self.codec.completion_text(source[0]))
        if not new.get("tool_calls") and _without_whitespace(new["content"]) == completion:
            return True
        rendered = _without_whitespace(self.codec.rendered_answer(messages, tools) or "")
        # The rendering may add an end token to the completion, and nothing else.
        ends = {_without_whitespace(self.codec.decode([token])) for token in self.codec.stop_token_ids}
        return bool(completion) and any(rendered == completion + end for end in ("", *ends))


def make_fork(codec: ChatCodec, divergence: Divergence, prompt_ids: Sequence[int]) -> Fork | None:
    """Return the fork at the first token of `prompt_ids` that differs from the earlier call.

    Returns:
        The fork; None if `prompt_ids` extend the earlier call although the messages differ.
    """
    assert divergence.message_index is not None
    expected = divergence.call.prompt_ids + divergence.call.completion_ids
    position = first_difference(expected, prompt_ids)
    if position == len(expected):
        return None
    expected_ids = tuple(expected[position : position + _SHOWN_TOKENS])
    found_ids = tuple(prompt_ids[position : position + _SHOWN_TOKENS])
    return Fork(
        cause=divergence.cause,
        call_id=divergence.call.call_id,
        position=position,
        expected_ids=expected_ids,
        found_ids=found_ids,
        expected=codec.decode(expected_ids),
        found=codec.decode(found_ids),
        message_index=divergence.message_index,
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the first index at which two sequences differ, or the length of the shorter one."""
    return shared_prefix_length(encode_ids(left), encode_ids(right))


def _answer_keys(conversation: Conversation, index: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys of an answer, the most specific first, because several agents can give the same short answer."""
    answer = conversation.digests[index]
    if index:
        yield conversation.digests[index - 1], answer
        yield conversation.digests[0], answer


def _without_whitespace(text: object) -> str:
    return "".join(str(text).split())

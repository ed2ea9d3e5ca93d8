"""The calls of an episode so far, and the search for the call that a new request extends."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.forks import CallIndex, Conversation, Divergence, first_difference, make_fork
from astuner.model_tuner.messages import digests, has_same_reasoning, with_reasoning
from astuner.schema import Completion, Fork, ForkCause, LlmCall, Message, Messages, Packed, Tools
from astuner.system.clock import timestamp

# Earlier calls that are searched for a shared prefix: enough for agents that take turns, and linear in time.
_SEARCHED_CALLS = 8


class RawPrompt(tuple[Message, ...]):
    """A prompt that is not rendered with the chat template, as a conversation of one message for the record.

    Attributes:
        content: the text, or the token ids.
    """

    content: str | tuple[int, ...]

    def __new__(cls, content: str | tuple[int, ...]) -> RawPrompt:
        """Return the prompt with this text or these token ids."""
        text = content if isinstance(content, str) else f"{len(content)} token ids"
        self = super().__new__(cls, [{"role": "user", "content": text}])
        self.content = content
        return self


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request.

    Attributes:
        messages: the messages of the request. If the ids extend an earlier call, they include the thinking that those
            ids contain and that the framework left out.
        fork: why the prompt does not extend an earlier call that it should have extended; None if it does.
        first_prompt_len: length of its conversation's first prompt; None if this is the first prompt.
    """

    token_ids: tuple[int, ...]
    messages: Messages
    fork: Fork | None = None
    first_prompt_len: int | None = None


@dataclass(frozen=True, slots=True)
class HistoryEdit:
    """A deliberate change of the history: the next request does not extend `call`, and its fork has this cause.

    Attributes:
        cause: why the history was changed.
        call: the last call before the change.
    """

    cause: ForkCause
    call: LlmCall


@dataclass(frozen=True, slots=True, eq=False)
class OpenCall:
    """An LLM call that has no answer yet; `prompt_tokens` is None for a model that is not the one in training."""

    agent_name: str
    target_tag: str
    start_time: float
    prompt_tokens: int | None


class StoredTokens(NamedTuple):
    """The token ids and logprobs of a call (see `LlmCall`)."""

    prompt_ids: Packed[int]
    completion_ids: Packed[int]
    logprobs: Packed[float]
    sampler_logprobs: Packed[float]


class TokenStore:
    """Stores an episode's tokens, in 4 bytes for a distinct token, if each call extends one of the last 8.

    Logprobs take 4 bytes each if they are of float32, and otherwise 8.
    """

    def __init__(self) -> None:
        self._ids, self._logprobs = array("i"), array("f")
        self._streams: deque[Packed[int]] = deque(maxlen=_SEARCHED_CALLS)

    def add(self, prompt: Sequence[int], completion: Completion) -> StoredTokens:
        """Store the tokens of a call.

        Raises:
            OverflowError: an id has more than 32 bits.
        """
        ids = array("i", prompt)
        shared, base = 0, Packed[int]()
        for stream in reversed(self._streams):
            size = min(len(stream), len(ids))
            left, right = np.asarray(stream.view(0, size)), np.frombuffer(ids, np.intc)[:size]
            differs = left != right
            length = int(differs.argmax()) if differs.any() else size
            if length > shared:
                shared, base = length, stream
            if length == len(stream) or length == len(ids):
                break
        start = len(self._ids)
        self._ids.extend(ids[shared:])
        self._ids.extend(completion.token_ids)
        stream = base.view(0, shared).concatenate(Packed([(self._ids, start, len(self._ids))]))
        self._streams.append(stream)
        end = len(ids)
        logprobs, sampler_logprobs = map(self._add_logprobs, (completion.logprobs, completion.sampler_logprobs))
        return StoredTokens(stream.view(0, end), stream.view(end, len(stream)), logprobs, sampler_logprobs)

    def _add_logprobs(self, logprobs: Sequence[float]) -> Packed[float]:
        exact, rounded = array("d", logprobs), array("f", logprobs)
        if array("d", rounded) != exact:
            return Packed([(exact, 0, len(exact))])
        start = len(self._logprobs)
        self._logprobs.extend(rounded)
        return Packed([(self._logprobs, start, len(self._logprobs))])


@dataclass
class History:
    """Record of an episode's calls, indexed by conversation. Thread-safe.

    Attributes:
        codec: converts messages to ids and back.
        episode_id: recorded with each call.
        on_call: called with each finished call.
        calls: the finished calls, in order of completion.
    """

    codec: ChatCodec
    episode_id: str = ""
    on_call: Callable[[LlmCall], None] | None = None
    calls: list[LlmCall] = field(default_factory=list)
    # An episode's calls may come from its own thread and from the gateway's.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _index: CallIndex = field(init=False)
    _tokens: TokenStore = field(default_factory=TokenStore)
    # The conversations of the latest calls, with their chains.
    _latest: deque[tuple[Conversation, list[bytes]]] = field(default_factory=lambda: deque(maxlen=_SEARCHED_CALLS))
    # The calls whose request and answer are a conversation, by the digest of the conversation.
    _calls_by_conversation: dict[bytes, list[LlmCall]] = field(default_factory=dict)
    # The length of the first prompt in a call's conversation, by call id.
    _first_prompt_lens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = CallIndex(self.codec)

    def record(self, prompt: Prompt, completion: Completion, answer: Message | None, **fields: Any) -> LlmCall:
        """Record a call that has just ended, and return it.

        Args:
            prompt: the prompt; without ids if the model is not the one in training.
            answer: the answer, normalised; None if the call was cut.
            fields: further fields of the call.
        """
        with self._lock:
            tokens = self._tokens.add(prompt.token_ids, completion)
            if self.calls and fields.get("sampling") == self.calls[-1].sampling:
                fields["sampling"] = self.calls[-1].sampling  # calls share equal parameters
            messages = (*prompt.messages, *(() if answer is None else (answer,)))
            call = LlmCall(
                call_id=f"{self.episode_id}/{len(self.calls)}",
                episode_id=self.episode_id,
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
                messages=_share_messages(messages, self.calls),
                fork=prompt.fork,
                end_time=timestamp(),
                **tokens._asdict(),
                **fields,
            )
            self.calls.append(call)
            if prompt.token_ids and answer is not None and not isinstance(prompt.messages, RawPrompt):
                first = prompt.first_prompt_len
                self._first_prompt_lens[call.call_id] = len(call.prompt_ids) if first is None else first
                conversation, chain = self._conversation(call.messages)
                self._latest.append((conversation, chain))
                self._calls_by_conversation.setdefault(chain[-1], []).append(call)
                self._index.add(call, conversation, chain)
        if self.on_call is not None:
            self.on_call(call)
        return call

    def mark_cut(self, call: LlmCall) -> None:
        """Mark a call as one whose answer did not reach the agent, so that it is not trained."""
        with self._lock:
            index = next(index for index, other in enumerate(self.calls) if other.call_id == call.call_id)
            self.calls[index] = replace(call, cut=True, trained=False)

    def _conversation(self, messages: Messages) -> tuple[Conversation, list[bytes]]:
        """Return messages with their digests, and with their chain (see `_chain`).

        Digests are not computed again for messages that are an earlier call's objects.
        """
        known: Sequence[bytes] = ()
        known_chain: Sequence[bytes] = ()
        for earlier, chain in reversed(self._latest):
            pairs = zip(messages, earlier.messages, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
            if shared > len(known):
                known, known_chain = earlier.digests[:shared], chain[:shared]
            if shared == min(len(messages), len(earlier.messages)):
                break
        conversation = Conversation(messages, digests(messages, known))
        return conversation, _chain(conversation.digests, known_chain)

    def prompt(
        self, messages: Messages, tools: Tools | None, tools_hash: str, edit: HistoryEdit | None = None
    ) -> Prompt:
        """Return the prompt of a normalised request.

        If possible, the ids are an earlier call's, followed by those for the new messages. After an `edit` of the
        history, they are those of the messages as they are.

        Raises:
            WorkflowError: the chat template rejects the messages.
        """
        with self._lock:
            if edit is not None:
                messages = self.codec.with_known_roles(messages)
                return self._render_fork(messages, tools, Divergence(edit.cause, edit.call, None))
            return self._prompt(messages, tools, tools_hash)

    def _prompt(self, messages: Messages, tools: Tools | None, tools_hash: str) -> Prompt:
        messages = _share_messages(self.codec.with_known_roles(messages), self.calls)
        request, chain = self._conversation(messages)
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
        calls: Sequence[LlmCall], messages: Messages, tools_hash: str
    ) -> tuple[LlmCall, ForkCause | None]:
        """Return the call of one conversation that a request continues, and the cause if it cannot be extended.

        Of several calls, this is the latest; the tokens of all are equally valid as context.
        """
        for call in reversed(calls):
            if call.tools_hash == tools_hash and has_same_reasoning(messages, call.messages):
                return call, None
        same_tools = [call for call in calls if call.tools_hash == tools_hash]
        return (same_tools[-1], "framework_edited_history") if same_tools else (calls[-1], "tools_changed")

    def _render_fork(self, messages: Messages, tools: Tools | None, divergence: Divergence | None) -> Prompt:
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


def _chain(digests: Sequence[bytes], known: Sequence[bytes] = ()) -> list[bytes]:
    """Return for each message a digest that covers all messages up to it; `known` has the first digests."""
    chain = list(known)
    running = chain[-1] if chain else b""
    for digest in digests[len(chain) :]:
        running = hashlib.blake2b(running + digest, digest_size=16).digest()
        chain.append(running)
    return chain


def _share_messages(messages: Messages, calls: Sequence[LlmCall]) -> tuple[Message, ...]:
    """Return messages, those at the beginning as the objects of an earlier call that has the same ones.

    Frameworks build the messages of each request anew, so that their texts would be kept once for each call.
    """
    shared: list[Message] = []
    for call in reversed(calls[-_SEARCHED_CALLS:]):
        common = []
        for message, earlier in zip(messages, call.messages, strict=False):
            if not _is_same(message, earlier):
                break
            common.append(earlier)
        if len(common) > len(shared):
            shared = common
        if len(shared) == min(len(messages), len(call.messages)):
            break
    return (*shared, *messages[len(shared) :])


def _is_same(left: object, right: object) -> bool:
    """Return whether two values are equal, and have the same types: 1, 1.0 and True are equal."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(_is_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return isinstance(left, str | int | float | bool) and left == right

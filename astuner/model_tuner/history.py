"""The calls of an episode so far, and the search for the call that a new request extends."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.forks import CallIndex, Conversation, Divergence, first_difference, make_fork
from astuner.model_tuner.messages import digests, has_same_reasoning, with_reasoning
from astuner.model_tuner.token_store import SEARCHED_CALLS, TokenStore, share_messages
from astuner.schema import Completion, Fork, ForkCause, LlmCall, Message
from astuner.system.clock import timestamp


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
    # The calls of an episode may come from its own thread and from that of the gateway.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _index: CallIndex = field(init=False)
    _tokens: TokenStore = field(default_factory=TokenStore)
    # The conversations of the latest calls, with their chains.
    _latest: deque[tuple[Conversation, list[bytes]]] = field(default_factory=lambda: deque(maxlen=SEARCHED_CALLS))
    # The calls whose request and answer are a conversation, by the digest of the conversation.
    _calls_by_conversation: dict[bytes, list[LlmCall]] = field(default_factory=dict)
    # The length of the first prompt of a call's conversation, by call id.
    _first_prompt_lens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = CallIndex(self.codec)

    def record(self, prompt: Prompt, completion: Completion, answer: Message | None, **fields: Any) -> LlmCall:
        """Record a call that has just ended, and return it.

        Args:
            prompt: the prompt; without ids if the model is not the one in training.
            completion: the completion.
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
                prompt_ids=tokens.prompt_ids,
                completion_ids=tokens.completion_ids,
                logprobs=tokens.logprobs,
                finish_reason=completion.finish_reason,
                policy_version=completion.policy_version,
                sampler_logprobs=tokens.sampler_logprobs,
                messages=share_messages(messages, self.calls),
                fork=prompt.fork,
                end_time=timestamp(),
                **fields,
            )
            self.calls.append(call)
            if prompt.token_ids and answer is not None and not isinstance(prompt.messages, RawPrompt):
                self._add_to_index(call, prompt.first_prompt_len)
        if self.on_call is not None:
            self.on_call(call)
        return call

    def mark_cut(self, call: LlmCall) -> None:
        """Mark a call as one whose answer did not reach the agent, so that it is not trained."""
        with self._lock:
            index = next(index for index, other in enumerate(self.calls) if other.call_id == call.call_id)
            self.calls[index] = replace(call, cut=True, trained=False)

    def _add_to_index(self, call: LlmCall, first_prompt_len: int | None) -> None:
        self._first_prompt_lens[call.call_id] = len(call.prompt_ids) if first_prompt_len is None else first_prompt_len
        conversation, chain = self._conversation(call.messages)
        self._latest.append((conversation, chain))
        self._calls_by_conversation.setdefault(chain[-1], []).append(call)
        self._index.add(call, conversation, chain)

    def _conversation(self, messages: Sequence[Message]) -> tuple[Conversation, list[bytes]]:
        """Return messages with their digests, and with their chain (see `_chain`).

        Those of messages that are the objects of an earlier call are not computed again.
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
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_hash: str,
        edit: HistoryEdit | None = None,
    ) -> Prompt:
        """Return the prompt of a normalised request.

        If possible, the ids are those of an earlier call, followed by those of the new messages. After an `edit` of the
        history, they are those of the messages as they are.

        Raises:
            WorkflowError: the chat template rejects the messages.
        """
        with self._lock:
            if edit is not None:
                messages = self.codec.with_known_roles(messages)
                return self._render_fork(messages, tools, Divergence(edit.cause, edit.call, None))
            return self._prompt(messages, tools, tools_hash)

    def _prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        tools_hash: str,
    ) -> Prompt:
        messages = share_messages(self.codec.with_known_roles(messages), self.calls)
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


def _chain(digests: Sequence[bytes], known: Sequence[bytes] = ()) -> list[bytes]:
    """Return, for each message, a digest of it and all messages before it; `known` has the first of them."""
    chain = list(known)
    running = chain[-1] if chain else b""
    for digest in digests[len(chain) :]:
        running = hashlib.blake2b(running + digest, digest_size=16).digest()
        chain.append(running)
    return chain

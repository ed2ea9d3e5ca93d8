"""Stores the tokens and messages in an episode's calls: what a call shares with an earlier one is kept once."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from astuner.schema import Completion, LlmCall, Message, Packed

SEARCHED_CALLS = 8
"""Earlier calls that are searched for a shared prefix: enough for agents that take turns, and linear in time."""


class StoredTokens(NamedTuple):
    """The token ids and logprobs of a call (see `LlmCall`)."""

    prompt_ids: Packed[int]
    completion_ids: Packed[int]
    logprobs: Packed[float]
    sampler_logprobs: Packed[float]


class TokenStore:
    """The tokens of an episode's calls: 4 bytes for each distinct token, if each call extends one of the last 8.

    Logprobs take 4 bytes each if they are of float32, and otherwise 8.
    """

    def __init__(self) -> None:
        self._ids, self._logprobs = array("i"), array("f")
        self._streams: deque[Packed[int]] = deque(maxlen=SEARCHED_CALLS)

    def add(self, prompt: Sequence[int], completion: Completion) -> StoredTokens:
        """Store the tokens of a call.

        Raises:
            OverflowError: If an id has more than 32 bits.
        """
        ids = array("i", prompt)
        shared, base = 0, Packed[int]()
        for stream in reversed(self._streams):
            length = _shared_length(stream, ids)
            if length > shared:
                shared, base = length, stream
            if length == len(stream) or length == len(ids):
                break
        start = len(self._ids)
        self._ids.extend(ids[shared:])
        self._ids.extend(completion.token_ids)
        stream = base.view(0, shared).joined(Packed([(self._ids, start, len(self._ids))]))
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


def _shared_length(stream: Packed[int], ids: array[int]) -> int:
    size = min(len(stream), len(ids))
    left, right = np.asarray(stream.view(0, size)), np.frombuffer(ids, np.intc)[:size]
    differs = left != right
    return int(differs.argmax()) if differs.any() else size


def share_messages(messages: Sequence[Mapping[str, Any]], calls: Sequence[LlmCall]) -> tuple[Message, ...]:
    """Return messages, those at the beginning as the objects of an earlier call that has the same ones.

    Frameworks build the messages of each request anew, so that their texts would be kept once for each call.
    """
    shared: list[Message] = []
    for call in reversed(calls[-SEARCHED_CALLS:]):
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

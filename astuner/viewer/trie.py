"""The trie of an episode's calls, and its tokens' origins: sampled, trained, or written by the chat template.

The trie's nodes are segments: runs of tokens without a branch inside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, takewhile, zip_longest
from typing import Any

from astuner.run_record.episode_file import common_prefix_len
from astuner.run_record.updates import SampleUpdate, by_token, entropy_by_token, span_values
from astuner.schema import LlmCall, Sample


@dataclass
class Segment:
    """A run of tokens without a branch.

    Attributes:
        parent: Index of the preceding segment; -1 for a root.
        start: Number of tokens before the segment.
        ids: Token ids of the segment.
        children: Indices of the segments that continue it.
    """

    parent: int
    start: int
    ids: tuple[int, ...]
    children: list[int] = field(default_factory=list)


class Trie:
    """Tree of segments in which every call is a path from a root. Each distinct token prefix is stored once."""

    def __init__(self, calls: Sequence[LlmCall]) -> None:
        self.segments: list[Segment] = []
        self._roots: list[int] = []
        self._ends = [self._insert(call.prompt_ids + call.completion_ids) for call in calls]

    def end(self, call: int) -> int:
        """Return the index of the segment with which a call ends; -1 for a call without tokens."""
        return self._ends[call]

    def path(self, call: int) -> list[int]:
        """Return the segment indices for a call's prompt and completion, from the root."""
        return self.path_to(self._ends[call])

    def path_to(self, segment: int) -> list[int]:
        """Return the indices of the segments from the root to `segment`."""
        path = []
        while segment >= 0:
            path.append(segment)
            segment = self.segments[segment].parent
        return path[::-1]

    def leaves(self) -> list[int]:
        """Return the index of each timeline's last segment, in depth-first order."""
        leaves, stack = [], self._roots[::-1]
        while stack:
            number = stack.pop()
            children = self.segments[number].children
            stack += children[::-1]
            if not children:
                leaves.append(number)
        return leaves

    def _insert(self, ids: tuple[int, ...]) -> int:
        parent, position = -1, 0
        while position < len(ids):
            siblings = self._roots if parent < 0 else self.segments[parent].children
            child = next((each for each in siblings if self.segments[each].ids[0] == ids[position]), None)
            if child is None:
                self.segments.append(Segment(parent, position, ids[position:]))
                siblings.append(len(self.segments) - 1)
                return len(self.segments) - 1
            segment = self.segments[child]
            shared = common_prefix_len(segment.ids, ids[position : position + len(segment.ids)])
            if shared < len(segment.ids):
                child = self._split(child, shared)
            parent, position = child, position + shared
        return parent

    def _split(self, number: int, at: int) -> int:
        """Split a segment and return the index of its first part. The second part keeps its index, which calls use."""
        second = self.segments[number]
        first = Segment(second.parent, second.start, second.ids[:at], [number])
        self.segments.append(first)
        new = len(self.segments) - 1
        siblings = self._roots if second.parent < 0 else self.segments[second.parent].children
        siblings[siblings.index(number)] = new
        second.parent, second.start, second.ids = new, second.start + at, second.ids[at:]
        return new


def sampled_runs(trie: Trie, calls: Sequence[LlmCall]) -> dict[int, list[dict[str, Any]]]:
    """Return the sampled runs of tokens by segment.

    `call` is the index of the call, `from` is relative to the segment, and `logprobs` has one value per token.
    """
    runs: dict[int, list[dict[str, Any]]] = {}
    for number, call in enumerate(calls):
        completion = len(call.prompt_ids)
        for segment, start, end in _pieces(trie, number, completion, completion + len(call.completion_ids)):
            first = trie.segments[segment].start + start - completion
            logprobs = [round(value, 4) for value in call.logprobs[first : first + end - start]]
            runs.setdefault(segment, []).append({"call": number, "from": start, "logprobs": logprobs})
    return runs


def trained_runs(
    trie: Trie, calls: Sequence[LlmCall], samples: Sequence[Sample], updates: Sequence[SampleUpdate]
) -> dict[int, list[dict[str, Any]]]:
    """Return, by segment, the spans of consecutive tokens that have the same train count (`mask`) and advantage.

    `sample` is the index of the sample; `from` and `to` (exclusive) are relative to the segment. `advantage`, and the
    trainer's `logprobs` and `entropies`, one per token, are None if the record does not have them.
    """
    numbers = {call.call_id: number for number, call in enumerate(calls)}
    runs: dict[int, list[dict[str, Any]]] = {}
    for index, (sample, update) in enumerate(zip_longest(samples, updates[: len(samples)])):
        unknown: list[float | None] = [None] * len(sample.train_counts)
        advantages, logprobs = by_token(sample, update) if update else (unknown, unknown)
        entropies = entropy_by_token(sample, update) if update else unknown
        for span in sample.spans:
            if span.call_id not in numbers:
                continue
            columns = [span_values(values, span) for values in (sample.train_counts, advantages, logprobs, entropies)]
            for segment, start, end in _pieces(trie, numbers[span.call_id], span.start, span.end):
                first = trie.segments[segment].start + start - span.start
                tokens = zip(*(column[first : first + end - start] for column in columns), strict=False)
                position = start
                for (mask, advantage), group in groupby(tokens, key=lambda token: token[:2]):
                    values = list(group)
                    run = {
                        "sample": index,
                        "from": position,
                        "to": position + len(values),
                        "mask": mask,
                        "advantage": advantage,
                        "logprobs": _rounded([token[2] for token in values]),
                        "entropies": _rounded([token[3] for token in values]),
                    }
                    position += len(values)
                    # Two calls that sampled the same tokens share one run, whose mask counts both.
                    if run not in runs.setdefault(segment, []):
                        runs[segment].append(run)
    return runs


def _rounded(values: Sequence[float | None]) -> list[float] | None:
    """Return rounded values; None if one is missing."""
    known = [round(value, 4) for value in values if value is not None]
    return known if len(known) == len(values) else None


def template_runs(trie: Trie, calls: Sequence[LlmCall], texts: Mapping[int, str]) -> dict[int, list[list[int]]]:
    """Return the runs [from, to (exclusive)] of prompt tokens that belong to no message's text, by segment.

    `texts` has the text of each token id. The messages' texts are searched one after the other in the tokens' text. A
    message that the template writes differently, such as tool calls as JSON, counts as the template's.
    """
    is_template: dict[int, bytearray] = {}
    longest = {trie.end(number): number for number in range(len(calls))}
    path: list[int] = []
    located = _LocatedMessages((), [(0, 0)])
    for leaf in trie.leaves():
        number = longest[leaf]
        earlier, path = path, trie.path(number)
        # Adjacent leaves share the longest prefix, which the earlier leaf has already classified.
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, path, strict=False)))
        shared = trie.segments[path[common]].start if common < len(path) else len(calls[number].prompt_ids)
        first, is_message, located = _locate_messages(calls[number], texts, located, shared)
        for segment, start, end in _pieces(trie, number, shared, len(calls[number].prompt_ids)):
            flags = is_template.setdefault(segment, bytearray(len(trie.segments[segment].ids)))
            offset = trie.segments[segment].start + start - first
            flags[start:end] = bytes(0 if flag else 1 for flag in is_message[offset : offset + end - start])
    runs: dict[int, list[list[int]]] = {}
    for number, flags in is_template.items():
        runs[number], position = [], 0
        for flag, group in groupby(flags):
            length = len(list(group))
            if flag:
                runs[number].append([position, position + length])
            position += length
    return runs


@dataclass(frozen=True, slots=True)
class _LocatedMessages:
    """Positions of a call's messages. `ends[k]`, a token and an offset in its text, is the end of the first k."""

    messages: Sequence[object]
    ends: list[tuple[int, int]]


def _locate_messages(
    call: LlmCall, texts: Mapping[int, str], earlier: _LocatedMessages, shared: int
) -> tuple[int, bytearray, _LocatedMessages]:
    """Return for each token of a call's prompt from a first token on whether it belongs to a message's text.

    The earlier call has the same first `shared` tokens in its prompt. Messages that end there are not searched
    again.
    """
    same = 0
    for left, right in zip(call.messages, earlier.messages, strict=False):
        if left is not right or earlier.ends[same + 1][0] >= shared:
            break
        same += 1
    first, position = earlier.ends[same]
    pieces = [texts.get(number, "") for number in call.prompt_ids[first:]]
    piece_ends = list(accumulate(map(len, pieces)))
    text = "".join(pieces)
    covered = bytearray(len(text) + 1)
    message_ends = earlier.ends[: same + 1]
    for message in call.messages[same:]:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in _texts(content):
            start = text.find(part, position) if part else -1
            if start >= 0:
                position = start + len(part)
                covered[start:position] = b"\x01" * len(part)
        token = bisect_left(piece_ends, position)
        message_ends.append((first + token, position - (piece_ends[token - 1] if token else 0)))
    is_message = bytearray(len(pieces))
    for index, end in enumerate(piece_ends):
        # A token that is partly the message's, such as a newline and the first word, counts as the message's.
        is_message[index] = covered.find(1, end - len(pieces[index]), end) >= 0
    return first, is_message, _LocatedMessages(call.messages, message_ends)


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content.strip()]
    if isinstance(content, list):
        return [text for part in content if isinstance(part, dict) for text in _texts(part.get("text"))]
    return []


def _pieces(trie: Trie, call: int, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return the segment pieces that hold a call's tokens `begin` to `end`, as (segment, from, to)."""
    pieces = []
    for number in trie.path(call):
        segment = trie.segments[number]
        start, stop = max(begin - segment.start, 0), min(end - segment.start, len(segment.ids))
        if start < stop:
            pieces.append((number, start, stop))
    return pieces

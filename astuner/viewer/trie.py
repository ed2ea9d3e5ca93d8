"""The trie of an episode's calls. Its nodes are segments: runs of tokens without a branch inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from astuner.run_record.episode_file import common_prefix_len
from astuner.schema import LlmCall


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

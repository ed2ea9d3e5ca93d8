"""The trie of an episode's calls as segments: stretches of tokens without a fork inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from astuner.run_record import shared_ids
from astuner.schema import LlmCall


@dataclass
class Segment:
    """A stretch of the trie.

    Attributes:
        parent: index of the segment before it, -1 at a root.
        start: how many tokens precede it.
        ids: its tokens.
        children: segments that go on from its end.
    """

    parent: int
    start: int
    ids: tuple[int, ...]
    children: list[int] = field(default_factory=list)


class Trie:
    """Segments in which every call is a path from a root; each distinct prefix of tokens is held once."""

    def __init__(self, calls: Sequence[LlmCall]) -> None:
        self.segments: list[Segment] = []
        self._roots: list[int] = []
        self._ends = [self._insert(call.prompt_ids + call.completion_ids) for call in calls]

    def end(self, call: int) -> int:
        """Return the segment at whose end a call ends; -1 where it has no token."""
        return self._ends[call]

    def path(self, call: int) -> list[int]:
        """Return the segments of a call's prompt and completion, from the root."""
        return self.path_to(self._ends[call])

    def path_to(self, segment: int) -> list[int]:
        """Return the segments from the root to `segment`."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = self.segments[segment].parent
        return found[::-1]

    def leaves(self) -> list[int]:
        """Return the last segment of each timeline, neighbours in the tree beside each other."""
        found, left = [], self._roots[::-1]
        while left:
            number = left.pop()
            children = self.segments[number].children
            left += children[::-1]
            if not children:
                found.append(number)
        return found

    def _insert(self, ids: tuple[int, ...]) -> int:
        parent, place = -1, 0
        while place < len(ids):
            child = self._child(parent, ids[place])
            if child is None:
                return self._add(parent, place, ids[place:])
            segment = self.segments[child]
            shared = shared_ids(segment.ids, ids[place : place + len(segment.ids)])
            if shared < len(segment.ids):
                child = self._split(child, shared)
            parent, place = child, place + shared
        return parent

    def _child(self, parent: int, token: int) -> int | None:
        children = self._roots if parent < 0 else self.segments[parent].children
        return next((child for child in children if self.segments[child].ids[0] == token), None)

    def _add(self, parent: int, start: int, ids: tuple[int, ...]) -> int:
        self.segments.append(Segment(parent, start, ids))
        (self._roots if parent < 0 else self.segments[parent].children).append(len(self.segments) - 1)
        return len(self.segments) - 1

    def _split(self, number: int, at: int) -> int:
        """Split a segment in two and return the first half, which is new: ends of calls stay what they were."""
        second = self.segments[number]
        first = Segment(second.parent, second.start, second.ids[:at], [number])
        self.segments.append(first)
        new = len(self.segments) - 1
        siblings = self._roots if second.parent < 0 else self.segments[second.parent].children
        siblings[siblings.index(number)] = new
        second.parent, second.start, second.ids = new, second.start + at, second.ids[at:]
        return new

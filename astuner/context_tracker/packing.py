"""Lay sequences that begin alike out so that every distinct prefix stands there once.

A depth-first walk through their trie, the longest branch first, writes every node once. The descendants of a node then
stand together right behind it, and the longest timelines in one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.context_tracker.prefixes import ID_BYTES, as_ids, encode_ids, shared_prefix_length

# Of a batch's places, so that computing it padded costs little.
_LEAST_FILLED = 0.75

Ids = NDArray[np.int64]
Path = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens that one sequence adds to those before it.

    Attributes:
        start, end: where they stand in the packing.
        path: (start, end) of the stretches that hold the tokens before them, outermost first.
    """

    start: int
    end: int
    path: Path

    @property
    def size(self) -> int:
        """Number of its tokens."""
        return self.end - self.start

    @property
    def depth(self) -> int:
        """Number of tokens before the first one."""
        return sum(end - start for start, end in self.path)


@dataclass(frozen=True, eq=False)
class Packing:
    """The trie of some sequences, N nodes, one token each.

    Attributes:
        token_ids: [N] int64.
        positions: [N] int64, depths.
        subtree_ends: [N] int64; the descendants of node i are i + 1 … subtree_ends[i] - 1. So node i is an ancestor of
            node j, or j itself, where i <= j < subtree_ends[i].
        pieces: stretches of nodes that follow one another in the trie, in order; together they are all nodes.
        places: for each sequence, as given, the nodes of its tokens [its length] int64.
    """

    token_ids: Ids
    positions: Ids
    subtree_ends: Ids
    pieces: tuple[Piece, ...]
    places: tuple[Ids, ...]

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Indices of pieces that follow the very same tokens and are nearly as long, largest first, together."""
        siblings: dict[Path, list[int]] = defaultdict(list)
        for index, piece in enumerate(self.pieces):
            siblings[piece.path].append(index)
        batches: list[list[int]] = []
        for indices in siblings.values():
            indices.sort(key=lambda index: -self.pieces[index].size)
            for at, index in enumerate(indices):
                if at and self.pieces[index].size >= _LEAST_FILLED * self.pieces[batches[-1][0]].size:
                    batches[-1].append(index)
                else:
                    batches.append([index])
        return tuple(map(tuple, batches))

    @property
    def parents(self) -> Ids:
        """[N] int64: the node before each, -1 for first tokens."""
        parents = np.arange(-1, len(self.token_ids) - 1)
        for piece in self.pieces:
            parents[piece.start] = piece.path[-1][1] - 1 if piece.path else -1
        return parents


def pack(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> Packing:
    """Lay out sequences of token ids; time and memory are proportional to their tokens.

    Raises:
        ValueError: a sequence is empty.
    """
    return pack_encoded([encode_ids(sequence) for sequence in sequences])


def pack_encoded(encoded: Sequence[bytes]) -> Packing:
    """Lay out sequences as `encode_ids` gives them, see `pack`."""
    if not all(encoded):
        raise ValueError("a sequence to pack must have at least one token")
    writer = _Writer(encoded)
    # What is to be done next stands last: a branch to write, or the end of one that was written.
    to_do: list[tuple[_Branch, Path] | tuple[int, int]] = [(branch, ()) for branch in _longest_last(_trie(encoded))]
    while to_do:
        first, second = to_do.pop()
        if isinstance(first, _Branch):
            assert isinstance(second, tuple)
            start = writer.total
            path = writer.write(first, second)
            to_do.append((start, writer.total))
            to_do += [(branch, path) for branch in _longest_last(first.branches)]
        else:
            assert isinstance(second, int)
            writer.subtree_ends[first:second] = writer.total
    return writer.packing()


@dataclass(eq=False)
class _Branch:
    """A stretch of the trie without a fork.

    Attributes:
        begin, end: depths of its first token, and behind its last.
        source: a sequence that goes through it.
        branches: what follows it.
        sequences: those that end with it.
        reach: the depth of the deepest of all sequences that go through it, once the walk has left it.
    """

    begin: int
    end: int
    source: int
    sequences: list[int]
    branches: list[_Branch] = field(default_factory=list)
    reach: int = 0

    def cut(self, depth: int) -> None:
        """End at `depth`; the rest becomes a branch of its own."""
        rest = _Branch(depth, self.end, self.source, self.sequences, self.branches, self.reach)
        self.end, self.sequences, self.branches = depth, [], [rest]


def _trie(encoded: Sequence[bytes]) -> list[_Branch]:
    """Return the branches that sequences begin with."""
    root = _Branch(0, 0, -1, [])
    way = [root]
    before = b""
    for index in sorted(range(len(encoded)), key=encoded.__getitem__):
        shared = shared_prefix_length(before, encoded[index])
        while way[-1].begin >= shared and way[-1] is not root:
            _step_back(way)
        if way[-1].end > shared:
            way[-1].cut(shared)
        length = len(encoded[index]) // ID_BYTES
        if length > shared:
            branch = _Branch(shared, length, index, [index], reach=length)
            way[-1].branches.append(branch)
            way.append(branch)
        else:
            way[-1].sequences.append(index)
        before = encoded[index]
    while way[-1] is not root:
        _step_back(way)
    return root.branches


def _step_back(way: list[_Branch]) -> None:
    left = way.pop()
    way[-1].reach = max(way[-1].reach, left.reach)


def _longest_last(branches: Sequence[_Branch]) -> list[_Branch]:
    """Order branches for a stack, so that the longest is written first and is one piece with what it follows."""
    # Of equally long ones the first comes first.
    return sorted(branches, key=lambda branch: branch.reach, reverse=True)[::-1]


class _Writer:
    """Writes branches one behind the other."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self.total = 0
        self.subtree_ends = np.zeros(sum(map(len, encoded)) // ID_BYTES, np.int64)
        self._encoded = encoded
        self._parts: list[Ids] = []
        self._positions: list[Ids] = []
        self._pieces: list[Piece] = []
        self._places: list[Ids] = [np.empty(0, np.int64)] * len(encoded)

    def write(self, branch: _Branch, path: Path) -> Path:
        """Write the tokens of a branch that follows `path`; return the path that ends with it."""
        ids = as_ids(self._encoded[branch.source])[branch.begin : branch.end]
        self._parts.append(ids.astype(np.int64))
        self._positions.append(np.arange(branch.begin, branch.end))
        start, self.total = self.total, self.total + len(ids)
        if path and path[-1][1] == start:
            last = self._pieces.pop()
            self._pieces.append(replace(last, end=self.total))
            path = (*path[:-1], (path[-1][0], self.total))
        else:
            self._pieces.append(Piece(start, self.total, path))
            path = (*path, (start, self.total))
        for index in branch.sequences:
            self._places[index] = np.concatenate([np.arange(start, end) for start, end in path])
        return path

    def packing(self) -> Packing:
        """Return what was written."""
        return Packing(
            np.concatenate(self._parts),
            np.concatenate(self._positions),
            self.subtree_ends[: self.total],
            tuple(self._pieces),
            tuple(self._places),
        )

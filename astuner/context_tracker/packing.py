"""Packs sequences with shared prefixes so that every distinct prefix is stored once.

A depth-first walk through the trie of the sequences, longest branch first, writes every node once. The descendants of a
node then follow it directly, and the longest sequences are contiguous.

Token ids are encoded as big-endian bytes, which sort in the id sequences' order, so Python's fast byte comparison
replaces a trie. In sorted order, a sequence that is another one's prefix is also the next one's prefix, and the number
of distinct prefixes is the total length minus the lengths that neighbours share as prefixes.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.schema import LlmCall, Packed, concatenate

ID_BYTES = 4
_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == ID_BYTES)
# The minimum fraction of a padded batch that is filled, so that padding costs little.
_MIN_FILLED = 0.75

Ids = NDArray[np.int64]
Path = tuple[tuple[int, int], ...]


def encode(call: LlmCall) -> bytes:
    """Return the call's prompt and completion ids as big-endian bytes, four per id."""
    return encode_ids(concatenate(call.prompt_ids, call.completion_ids))


def encode_ids(ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Return ids as big-endian bytes, four per id."""
    if isinstance(ids, Packed):
        ids = np.asarray(ids)
    if isinstance(ids, np.ndarray):
        return ids.astype(">u4").tobytes()
    # Three times as fast as numpy, which inspects the type of each number.
    numbers = array(_TYPE_CODE, ids)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()


def as_ids(encoded: bytes) -> NDArray[np.uint32]:
    """Return the ids of an encoded sequence, [N]."""
    return np.frombuffer(encoded, dtype=">u4")


def shared_prefix_length(left: bytes, right: bytes) -> int:
    """Return the length, in ids, of two encoded sequences' common prefix."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // ID_BYTES
    differs = as_ids(left[:size]) != as_ids(right[:size])
    return int(differs.argmax())


def in_prefix_order(encoded: Sequence[bytes]) -> list[tuple[int, int]]:
    """Sort encoded sequences so that those with a common prefix are neighbours.

    Returns:
        Each sequence's index, in sorted order, and its number of new tokens: those after the prefix that it shares
        with the sequence before it. Equal sequences keep their order.
    """
    ordered: list[tuple[int, int]] = []
    previous = b""
    for index in sorted(range(len(encoded)), key=encoded.__getitem__):
        sequence = encoded[index]
        ordered.append((index, len(sequence) // ID_BYTES - shared_prefix_length(previous, sequence)))
        previous = sequence
    return ordered


def count_distinct_prefixes(encoded: Sequence[bytes]) -> int:
    """Return how many distinct non-empty prefixes the sequences have, which are the nodes of their trie."""
    return sum(new_tokens for _, new_tokens in in_prefix_order(encoded))


@dataclass(frozen=True, eq=False)
class Piece:
    """A contiguous run of nodes, where each node is the previous one's child.

    Attributes:
        start, end: the range of the nodes in the packing.
        path: (start, end) for the runs with the sequence's preceding tokens, from the root.
    """

    start: int
    end: int
    path: Path

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.end - self.start

    @property
    def depth(self) -> int:
        """The number of tokens that precede the piece in its sequences."""
        return sum(end - start for start, end in self.path)


@dataclass(frozen=True, eq=False)
class Packing:
    """A trie for token sequences, whose N nodes are tokens.

    Attributes:
        token_ids: [N] int64.
        positions: [N] int64, the depths of the nodes.
        subtree_ends: [N] int64; the descendants of node i are i + 1 … subtree_ends[i] - 1. So node i is node j or an
            ancestor of node j if and only if i <= j < subtree_ends[i].
        pieces: runs of nodes, in order, that together cover all nodes.
        places: for each sequence, in argument order, its tokens' nodes, [length] int64.
    """

    token_ids: Ids
    positions: Ids
    subtree_ends: Ids
    pieces: tuple[Piece, ...]
    places: tuple[Ids, ...]

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Batches of piece indices, with equal paths and similar lengths; each batch has its longest piece first."""
        siblings: dict[Path, list[int]] = defaultdict(list)
        for index, piece in enumerate(self.pieces):
            siblings[piece.path].append(index)
        batches: list[list[int]] = []
        for indices in siblings.values():
            indices.sort(key=lambda index: -self.pieces[index].size)
            for rank, index in enumerate(indices):
                if rank and self.pieces[index].size >= _MIN_FILLED * self.pieces[batches[-1][0]].size:
                    batches[-1].append(index)
                else:
                    batches.append([index])
        return tuple(map(tuple, batches))

    @property
    def parents(self) -> Ids:
        """The parent of each node, [N] int64; -1 for first tokens."""
        parents = np.arange(-1, len(self.token_ids) - 1)
        for piece in self.pieces:
            parents[piece.start] = piece.path[-1][1] - 1 if piece.path else -1
        return parents


def pack_encoded(encoded: Sequence[bytes]) -> Packing:
    """Pack token ids encoded with `encode_ids`, with time and memory proportional to the number of tokens.

    Raises:
        ValueError: a sequence is empty.
    """
    if not all(encoded):
        raise ValueError("a sequence to pack must have at least one token")
    writer = _Writer(encoded)
    # A stack with branches to write, and with branches (start, end) whose subtree is complete.
    stack: list[tuple[_Branch, Path] | tuple[int, int]] = [(branch, ()) for branch in _by_reach(_trie(encoded))]
    while stack:
        first, second = stack.pop()
        if isinstance(first, _Branch):
            assert isinstance(second, tuple)
            start = writer.total
            path = writer.write(first, second)
            stack.append((start, writer.total))
            stack += [(branch, path) for branch in _by_reach(first.branches)]
        else:
            assert isinstance(second, int)
            writer.subtree_ends[first:second] = writer.total
    return writer.packing()


def pack_separate(encoded: Sequence[bytes]) -> Packing:
    """Pack sequences that are encoded with `encode_ids` one after the other, each with all of its tokens.

    Raises:
        ValueError: a sequence is empty.
    """
    if not all(encoded):
        raise ValueError("a sequence to pack must have at least one token")
    writer = _Writer(encoded)
    for index, sequence in enumerate(encoded):
        start = writer.total
        writer.write(_Branch(0, len(sequence) // ID_BYTES, index, [index]), ())
        writer.subtree_ends[start : writer.total] = writer.total
    return writer.packing()


@dataclass(eq=False)
class _Branch:
    """A path of the trie without a fork.

    Attributes:
        begin, end: the depths of its first token and after its last token.
        source: the index of a sequence that contains it.
        sequences: the indices of the sequences that end with it.
        reach: the depth of its deepest descendant; set when the walk leaves the branch.
    """

    begin: int
    end: int
    source: int
    sequences: list[int]
    branches: list[_Branch] = field(default_factory=list)
    reach: int = 0

    def cut(self, depth: int) -> None:
        """End the branch at `depth`; the rest becomes a child branch."""
        rest = _Branch(depth, self.end, self.source, self.sequences, self.branches, self.reach)
        self.end, self.sequences, self.branches = depth, [], [rest]


def _trie(encoded: Sequence[bytes]) -> list[_Branch]:
    """Return the root branches of the trie."""
    root = _Branch(0, 0, -1, [])
    path = [root]
    for index, new_tokens in in_prefix_order(encoded):
        length = len(encoded[index]) // ID_BYTES
        shared = length - new_tokens
        while path[-1].begin >= shared and path[-1] is not root:
            _leave(path)
        if path[-1].end > shared:
            path[-1].cut(shared)
        if new_tokens:
            branch = _Branch(shared, length, index, [index], reach=length)
            path[-1].branches.append(branch)
            path.append(branch)
        else:
            path[-1].sequences.append(index)
    while path[-1] is not root:
        _leave(path)
    return root.branches


def _leave(path: list[_Branch]) -> None:
    branch = path.pop()
    path[-1].reach = max(path[-1].reach, branch.reach)


def _by_reach(branches: Sequence[_Branch]) -> list[_Branch]:
    """Return the branches by ascending reach: a stack pops the longest first, so it is contiguous with its parent."""
    # Among branches of equal reach, the first is popped first.
    return sorted(branches, key=lambda branch: branch.reach, reverse=True)[::-1]


class _Writer:
    """Builds a packing from branches, which are written in depth-first order."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self.total = 0
        self.subtree_ends = np.zeros(sum(map(len, encoded)) // ID_BYTES, np.int64)
        self._encoded = encoded
        self._parts: list[Ids] = []
        self._positions: list[Ids] = []
        self._pieces: list[Piece] = []
        self._places: list[Ids] = [np.empty(0, np.int64)] * len(encoded)

    def write(self, branch: _Branch, path: Path) -> Path:
        """Write the tokens of a branch with parent path `path`; return the path that includes the branch."""
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
        """Return the packing of all written branches."""
        return Packing(
            np.concatenate(self._parts),
            np.concatenate(self._positions),
            self.subtree_ends[: self.total],
            tuple(self._pieces),
            tuple(self._places),
        )

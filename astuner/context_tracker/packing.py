"""Lay sequences that begin alike out so that every distinct prefix stands there once.

Sorted sequences are a depth-first walk through their trie: of each, only what it does not share with the one before is
new. Written one after the other, these pieces hold every node of the trie once, and the descendants of a node stand
together right behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.context_tracker.prefixes import as_ids, encode_ids, shared_prefix_length

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
    encoded = [encode_ids(sequence) for sequence in sequences]
    if not all(encoded):
        raise ValueError("a sequence to pack must have at least one token")
    order = sorted(range(len(encoded)), key=encoded.__getitem__)
    places: list[Ids] = [np.empty(0, np.int64)] * len(encoded)
    total = 0
    parts: list[Ids] = []
    ends = np.zeros(sum(map(len, sequences)), np.int64)
    pieces: list[Piece] = []
    before, before_places = b"", np.empty(0, np.int64)
    path: Path = ()
    for index in order:
        ids = as_ids(encoded[index])
        shared = shared_prefix_length(before, encoded[index])
        ends[before_places[shared:]] = total
        path = _cut(path, shared)
        if len(ids) > shared:
            piece = Piece(total, total + len(ids) - shared, path)
            if path and path[-1][1] == total:  # it goes on where the last piece ends, so both are one
                piece = replace(pieces.pop(), end=piece.end)
            pieces.append(piece)
            parts.append(ids[shared:].astype(np.int64))
            path = (*piece.path, (piece.start, piece.end))
            total = piece.end
        before = encoded[index]
        before_places = places[index] = np.concatenate([np.arange(start, end) for start, end in path])
    ends[before_places] = total
    positions = np.concatenate([np.arange(piece.depth, piece.depth + piece.end - piece.start) for piece in pieces])
    return Packing(np.concatenate(parts), positions, ends[:total], tuple(pieces), tuple(places))


def _cut(path: Path, length: int) -> Path:
    """Return the first `length` tokens of a path."""
    kept = []
    for start, end in path:
        if length <= 0:
            break
        kept.append((start, min(end, start + length)))
        length -= end - start
    return tuple(kept)

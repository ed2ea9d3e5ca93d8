"""A prefix cache: the KV cache of computed token sequences, with each common prefix stored once.

A radix tree over token ids, as in SGLang's RadixAttention (Zheng et al. 2024, https://arxiv.org/abs/2312.07104). Each
edge holds token ids and their KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TokenArray = NDArray[np.int64]
# Evict down to this share of the capacity, so that a single walk over the tree serves many insertions.
_EVICTION_TARGET = 7 / 8


@dataclass(slots=True, eq=False)
class _Node:
    """A node and the edge to its parent: `ids` [n] and their cache `kv` [planes, heads, n, width]."""

    ids: TokenArray
    kv: Tensor | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used_at: int = 0


class PrefixTree:
    """A bounded cache of prefixes, which evicts the least recently used leaves.

    Args:
        capacity: maximum number of tokens; 0 disables the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._clock = 0
        self.clear()

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens."""
        return self._num_tokens

    def clear(self) -> None:
        """Remove everything."""
        self._root = _Node(np.empty(0, dtype=np.int64), None, None)
        self._num_tokens = 0

    def match(self, token_ids: Sequence[int]) -> list[Tensor]:
        """Return the cache for the longest cached prefix of `token_ids`: tensors [planes, heads, n, width] in order."""
        path, used = self._walk(np.asarray(token_ids, dtype=np.int64))
        pieces = [node.kv for node in path if node.kv is not None]
        if pieces and used < len(path[-1].ids):
            pieces[-1] = pieces[-1][..., :used, :]
        return pieces

    def insert(self, token_ids: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Add a sequence.

        Args:
            token_ids: ids of the sequence.
            read: `read(start, stop)` returns a copy of the sequence's cache at those positions,
                [planes, heads, stop - start, width]. Called only for positions that are not cached yet.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        path, used = self._walk(ids)
        cached = sum(len(node.ids) for node in path[:-1]) + used
        missing = len(ids) - cached
        if missing == 0 or len(ids) > self._capacity:
            return
        if used < len(path[-1].ids):
            path[-1] = self._split(path[-1], used)
        end = path[-1]
        if self._num_tokens + missing > self._capacity:
            # Nodes of the path are not evicted: together with the missing ids they fit into the capacity.
            self._evict(max(0, int(self._capacity * _EVICTION_TARGET) - missing), path)
        leaf = _Node(ids[cached:].copy(), read(cached, len(ids)), end, used_at=self._clock)
        end.children[int(leaf.ids[0])] = leaf
        self._num_tokens += missing

    def _walk(self, ids: TokenArray) -> tuple[list[_Node], int]:
        """Return the nodes in the longest cached prefix, root first, and how many of the last node's ids are in it."""
        self._clock += 1
        node, path, position = self._root, [self._root], 0
        while position < len(ids) and (child := node.children.get(int(ids[position]))) is not None:
            child.used_at = self._clock
            path.append(child)
            common = _common_length(child.ids, ids[position:])
            if common < len(child.ids):
                return path, common
            node, position = child, position + common
        return path, len(node.ids)

    def _split(self, node: _Node, at: int) -> _Node:
        """Split an edge and return the upper part. The parts have separate memory, so that each can be evicted."""
        assert node.parent is not None
        assert node.kv is not None
        kv = node.kv
        upper = _Node(node.ids[:at].copy(), kv[..., :at, :].clone(), node.parent, used_at=node.used_at)
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.kv, node.parent = node.ids[at:].copy(), kv[..., at:, :].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _evict(self, target: int, keep: Sequence[_Node]) -> None:
        """Evict the least recently used leaves until at most `target` tokens, or only the nodes of `keep`, are left."""
        keep_ids = set(map(id, keep))
        while self._num_tokens > target:
            leaves = [node for node in self._nodes() if not node.children and id(node) not in keep_ids]
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda node: node.used_at):
                if self._num_tokens <= target:
                    return
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self._num_tokens -= len(leaf.ids)

    def _nodes(self) -> Iterator[_Node]:
        """Yield all nodes except the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common_length(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(a), len(b))
    differing = np.flatnonzero(a[:size] != b[:size])
    return int(differing[0]) if len(differing) else size

"""The KV caches of the running requests and the prefixes that were computed before.

Each running request has a lane. Lanes of equal capacity form a slab; capacities are 256, 512, 1024 … tokens, up to the
model's limit. A request starts in the smallest sufficient capacity and moves to a larger one when it outgrows it. So
memory is proportional to the actual lengths within a factor of two, and short sequences are not padded to the longest.
The lanes of a slab are dense: the last lane replaces a freed one, so that a decode step reads plain views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.llm_engine.embedded.forward import KvShape
from astuner.llm_engine.embedded.request import Request

MIN_CAPACITY = 256
# Of lanes on a CPU, in bytes; that of PyTorch's own memory.
_ALIGNMENT = 64
# Default size of the prefix cache, in tokens per concurrent request.
_PREFIX_TOKENS_PER_SEQ = 1024
# The prefix cache evicts down to this share of the capacity, so that one walk over the tree serves many insertions.
_EVICTION_TARGET = 7 / 8

_TokenArray = NDArray[np.int64]


class Slab:
    """Lanes of one capacity.

    Attributes:
        capacity: tokens per lane.
        kv: [planes, num_lanes, heads, capacity, width]; lane `i` belongs to `requests[i]`. Unused positions are finite:
            attention multiplies masked positions by 0, which would not remove NaNs of diverged weights.
        requests: the requests of the used lanes. Further lanes are free.
    """

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Request] = []
        self._shape = shape
        self.kv = self._zeros(0)

    @property
    def num_lanes(self) -> int:
        """Number of allocated lanes, used or free."""
        return self.kv.shape[1]

    def resize(self, num_lanes: int) -> None:
        """Reallocate to `num_lanes` lanes, which must be at least the number of used lanes."""
        kv = self._zeros(num_lanes)
        used = len(self.requests)
        kv[:, :used] = self.kv[:, :used]
        self.kv = kv

    def _zeros(self, num_lanes: int) -> Tensor:
        shape = self._shape
        size = (shape.planes, num_lanes, shape.heads, self.capacity, shape.width)
        if shape.device.type != "cpu" or 0 in size:
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        # np.zeros is lazy: its pages take no memory or time until they are written. torch.zeros writes all of them.
        # Kernels sum in an order that depends on the alignment, so that equal runs need equal ones.
        n_bytes = math.prod(size) * shape.dtype.itemsize
        flat = np.zeros(n_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -flat.ctypes.data % _ALIGNMENT
        return torch.from_numpy(flat[start : start + n_bytes]).view(shape.dtype).view(size)

    def remove(self, lane: int, *, may_have_nan: bool = False) -> None:
        """Free a lane, and move the last lane to its index. A lane that `may_have_nan` is zeroed."""
        if may_have_nan:
            self.kv[:, lane, :, : len(self.requests[lane].tokens)] = 0
        last = self.requests.pop()
        end, filled = len(self.requests), len(last.tokens)
        if lane < end:
            self.requests[lane] = last
            self.kv[:, lane, :, :filled] = self.kv[:, end, :, :filled]


class KvStore:
    """Lanes for at most `max_lanes` requests of at most `max_len` tokens.

    Args:
        shape: shape of one token's cache.
        max_lanes: maximum number of concurrent requests.
        max_len: maximum number of tokens in a request.
        budget_tokens: maximum memory, in tokens. Only a request that has the store to itself may exceed it.
    """

    def __init__(self, shape: KvShape, max_lanes: int, max_len: int, budget_tokens: int) -> None:
        self._shape = shape
        self._max_lanes = max_lanes
        self._max_len = max_len
        self._budget_tokens = budget_tokens
        self._slabs: dict[int, Slab] = {}
        self._where: dict[Request, Slab] = {}

    def __len__(self) -> int:
        return len(self._where)

    @property
    def slabs(self) -> list[Slab]:
        """The slabs that have used lanes."""
        return [slab for slab in self._slabs.values() if slab.requests]

    @property
    def allocated_bytes(self) -> int:
        """Allocated memory in bytes."""
        return self.allocated_tokens * self._shape.bytes_per_token

    @property
    def allocated_tokens(self) -> int:
        """Allocated memory in tokens."""
        return sum(slab.num_lanes * slab.capacity for slab in self._slabs.values())

    def place(self, request: Request, prefix: Sequence[Tensor], upcoming: Iterable[Request] = ()) -> bool:
        """Assign a lane to `request` that has room for its tokens, and copy `prefix` into it.

        Args:
            request: a request without a lane.
            prefix: tensors [planes, heads, n, width], the cache of the request's first tokens.
            upcoming: requests that will be placed next, in order.

        Returns:
            False if there is not enough memory.
        """
        slab = self._slab_with_room(len(request.tokens), alone=len(self) == 0, upcoming=upcoming)
        if slab is None:
            return False
        kv, start = self._append(slab, request), 0
        for piece in prefix:
            stop = start + piece.shape[-2]
            kv[..., start:stop, :] = piece
            start = stop
        return True

    def make_room(self, request: Request) -> bool:
        """Move `request` to a larger lane if it has outgrown its own. Return False if there is not enough memory."""
        old = self._where[request]
        if len(request.tokens) <= old.capacity:
            return True
        new = self._slab_with_room(len(request.tokens), alone=len(self) == 1)
        if new is None:
            return False
        lane = old.requests.index(request)
        self._append(new, request)[..., : old.capacity, :] = old.kv[:, lane]
        old.remove(lane)
        return True

    def lane(self, request: Request) -> Tensor:
        """Return the cache of `request`, a view [planes, heads, capacity, width] that is valid until lanes change."""
        slab = self._where[request]
        return slab.kv[:, slab.requests.index(request)]

    def release(self, request: Request, *, may_have_nan: bool = False) -> None:
        """Free the lane of `request`. `may_have_nan`: whether its contents may not be finite."""
        slab = self._where.pop(request)
        slab.remove(slab.requests.index(request), may_have_nan=may_have_nan)

    def clear(self) -> None:
        """Free all lanes and all memory."""
        self._slabs.clear()
        self._where.clear()

    def _append(self, slab: Slab, request: Request) -> Tensor:
        slab.requests.append(request)
        self._where[request] = slab
        return slab.kv[:, len(slab.requests) - 1]

    def _capacity_for(self, num_tokens: int) -> int:
        capacity = MIN_CAPACITY
        while capacity < num_tokens:
            capacity *= 2
        return min(capacity, self._max_len)

    def _slab_with_room(self, num_tokens: int, *, alone: bool, upcoming: Iterable[Request] = ()) -> Slab | None:
        """Return a slab for `num_tokens` with a free lane, or None if there is not enough memory."""
        capacity = self._capacity_for(num_tokens)
        slab = self._slabs.get(capacity)
        if slab is None:
            slab = Slab(self._shape, capacity)
            self._slabs[capacity] = slab
        used = len(slab.requests)
        if used < slab.num_lanes:
            return slab
        others = islice(upcoming, max(0, self._max_lanes - len(self) - 1))
        soon = 1 + sum(self._capacity_for(len(other.tokens)) == capacity for other in others)
        target = min(max(2 * used, used + soon), self._max_lanes)
        if self.allocated_tokens + capacity * (target - used) <= self._budget_tokens:
            slab.resize(target)
            return slab
        used_tokens = sum(len(each.requests) * each.capacity for each in self._slabs.values())
        if not alone and used_tokens + capacity > self._budget_tokens:
            return None
        for each in self._slabs.values():
            # Free lanes are released only now that memory is short, since it copies the slab.
            if each.num_lanes > len(each.requests):
                each.resize(len(each.requests))
        slab.resize(used + 1)
        return slab


@dataclass(slots=True, eq=False)
class _Node:
    """A node and the edge to its parent: `ids` [n] and their cache `kv` [planes, heads, n, width]."""

    ids: _TokenArray
    kv: Tensor | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    used_at: int = 0


class PrefixTree:
    """A bounded cache of computed token sequences, in which each common prefix is stored once.

    It is a radix tree over token ids, as in SGLang's RadixAttention (Zheng et al. 2024,
    https://arxiv.org/abs/2312.07104). Each edge holds token ids and their KV cache. The least recently used leaves are
    evicted.

    Args:
        capacity: maximum number of tokens; 0 disables the cache.

    Attributes:
        num_tokens: number of cached tokens.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._clock = 0
        self.clear()

    def clear(self) -> None:
        """Remove everything."""
        self._root = _Node(np.empty(0, dtype=np.int64), None, None)
        self.num_tokens = 0

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
        if self.num_tokens + missing > self._capacity:
            # Nodes of the path are not evicted: together with the missing ids they fit into the capacity.
            self._evict(max(0, int(self._capacity * _EVICTION_TARGET) - missing), path)
        leaf = _Node(ids[cached:].copy(), read(cached, len(ids)), end, used_at=self._clock)
        end.children[int(leaf.ids[0])] = leaf
        self.num_tokens += missing

    def _walk(self, ids: _TokenArray) -> tuple[list[_Node], int]:
        """Return the nodes in the longest cached prefix, root first, and how many of the last node's ids are in it."""
        self._clock += 1
        node, path, position = self._root, [self._root], 0
        while position < len(ids) and (child := node.children.get(int(ids[position]))) is not None:
            child.used_at = self._clock
            path.append(child)
            size = min(len(child.ids), len(ids) - position)
            differing = np.flatnonzero(child.ids[:size] != ids[position : position + size])
            common = int(differing[0]) if len(differing) else size
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
        while self.num_tokens > target:
            leaves, nodes = [], list(self._root.children.values())
            for node in nodes:  # the loop appends to the list
                nodes += node.children.values()
                if not node.children and id(node) not in keep_ids:
                    leaves.append(node)
            if not leaves:
                return
            for leaf in sorted(leaves, key=lambda node: node.used_at):
                if self.num_tokens <= target:
                    return
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.num_tokens -= len(leaf.ids)


def default_prefix_cache_tokens(shape: KvShape, max_num_seqs: int, free: int | None = None) -> int:
    """Return the prefix cache's default size in tokens: 1024 per request, at most an eighth of the free memory.

    Args:
        shape: keys and values of a token.
        max_num_seqs: maximum number of concurrent requests.
        free: free bytes of the device; None to ask the device.
    """
    free = _free_bytes(shape.device) if free is None else free
    return min(_PREFIX_TOKENS_PER_SEQ * max_num_seqs, _tokens_in(free // 8, shape))


def default_lane_tokens(shape: KvShape, max_num_seqs: int, max_model_len: int, free: int | None = None) -> int:
    """Return the default budget for a `KvStore` in tokens: all that it can use, at most half of the free memory.

    Slabs allocate at most four times the tokens in them. For `free`, see `default_prefix_cache_tokens`.
    """
    free = _free_bytes(shape.device) if free is None else free
    return min(4 * max_num_seqs * max_model_len, _tokens_in(free // 2, shape))


def _tokens_in(num_bytes: int, shape: KvShape) -> int:
    return num_bytes // max(1, shape.bytes_per_token)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.virtual_memory().available
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)

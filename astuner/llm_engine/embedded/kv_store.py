"""The cache of the sequences that are being sampled.

Lanes live in slabs, one slab a length class: 256, 512, 1024 … tokens, up to the model's limit. A sequence starts in
the class that it needs and moves on when it outgrows it, so memory follows the actual lengths within a factor of two,
and short sequences are not padded to the longest. The lanes of a slab are dense: whichever ends is replaced by
the last, so a decode step reads plain views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from astuner.llm_engine.embedded.forward import KvShape
from astuner.llm_engine.embedded.request import Request

MIN_CAPACITY = 256


class Slab:
    """Lanes of one capacity.

    Attributes:
        capacity: tokens per lane.
        kv: [planes, lanes held, heads, capacity, width]; lane `i` is `requests[i]`'s. What is not filled is finite:
            masked positions are multiplied by 0, which would not mend the NaN that diverged weights may leave.
        requests: the lanes' owners; lanes past their number are free.
    """

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Request] = []
        self._shape = shape
        self.kv = self._zeros(0)

    @property
    def num_lanes(self) -> int:
        """Lanes that memory is held for."""
        return self.kv.shape[1]

    def resize(self, num_lanes: int) -> None:
        """Hold memory for `num_lanes` lanes, at least as many as are in use."""
        kv = self._zeros(num_lanes)
        used = len(self.requests)
        kv[:, :used] = self.kv[:, :used]
        self.kv = kv

    def _zeros(self, num_lanes: int) -> Tensor:
        """Memory for lanes."""
        shape = self._shape
        size = (shape.planes, num_lanes, shape.heads, self.capacity, shape.width)
        if shape.device.type != "cpu" or 0 in size:
            return torch.zeros(size, dtype=shape.dtype, device=shape.device)
        # numpy's zeros are pages that take no memory and no time until they are written to; torch writes them all.
        flat = np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(flat).view(shape.dtype).view(size)

    def remove(self, lane: int, *, spoilt: bool = False) -> None:
        """Free a lane; the last one moves into its place. A `spoilt` one may hold NaN and is wiped."""
        if spoilt:
            self.kv[:, lane, :, : len(self.requests[lane].tokens)] = 0
        last = self.requests.pop()
        end, filled = len(self.requests), len(last.tokens)
        if lane < end:
            self.requests[lane] = last
            self.kv[:, lane, :, :filled] = self.kv[:, end, :, :filled]


class KvStore:
    """Lanes for at most `max_lanes` sequences of at most `max_len` tokens.

    Args:
        shape: what one token takes.
        max_lanes: sequences at once.
        max_len: tokens of the longest sequence.
        budget_tokens: memory to hold, in tokens. Only a sequence that has the store to itself may exceed it.
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
        """Slabs with a lane in use."""
        return [slab for slab in self._slabs.values() if slab.requests]

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that are held."""
        return self.held_tokens * self._shape.bytes_per_token

    @property
    def held_tokens(self) -> int:
        """Tokens that memory is held for."""
        return sum(slab.num_lanes * slab.capacity for slab in self._slabs.values())

    def place(self, request: Request, prefix: Sequence[Tensor], to_come: Iterable[Request] = ()) -> bool:
        """Give `request` a lane that holds its tokens, and copy `prefix` into it.

        Args:
            request: has no lane yet.
            prefix: pieces [planes, heads, n, width] of the cache of its first tokens.
            to_come: requests about to be placed after it, in order.

        Returns:
            False where memory does not allow it.
        """
        slab = self._slab_with_room(len(request.tokens), alone=len(self) == 0, to_come=to_come)
        if slab is None:
            return False
        kv, start = self._append(slab, request), 0
        for piece in prefix:
            stop = start + piece.shape[-2]
            kv[..., start:stop, :] = piece
            start = stop
        return True

    def make_room(self, request: Request) -> bool:
        """See to it that the lane of `request` holds all of its tokens; False where memory does not allow it."""
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
        """The cache of `request`, a view [planes, heads, capacity, width]; valid until lanes change."""
        slab = self._where[request]
        return slab.kv[:, slab.requests.index(request)]

    def release(self, request: Request, *, spoilt: bool = False) -> None:
        """Free the lane of `request`; say so where its contents may be `spoilt` by numbers that are not finite."""
        slab = self._where.pop(request)
        slab.remove(slab.requests.index(request), spoilt=spoilt)

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

    def _slab_with_room(self, num_tokens: int, *, alone: bool, to_come: Iterable[Request] = ()) -> Slab | None:
        """A slab for `num_tokens` with a free lane, or None where memory does not allow it."""
        capacity = self._capacity_for(num_tokens)
        slab = self._slabs.get(capacity)
        if slab is None:
            slab = Slab(self._shape, capacity)
            self._slabs[capacity] = slab
        used = len(slab.requests)
        if used < slab.num_lanes:
            return slab
        others = islice(to_come, max(0, self._max_lanes - len(self) - 1))
        soon = 1 + sum(self._capacity_for(len(other.tokens)) == capacity for other in others)
        wished = min(max(2 * used, used + soon), self._max_lanes)
        if self.held_tokens + capacity * (wished - used) <= self._budget_tokens:
            slab.resize(wished)
            return slab
        used_tokens = sum(len(each.requests) * each.capacity for each in self._slabs.values())
        if not alone and used_tokens + capacity > self._budget_tokens:
            return None
        for each in self._slabs.values():
            # Free lanes are given back, which copies a slab, only where that makes the difference.
            if each.num_lanes > len(each.requests):
                each.resize(len(each.requests))
        slab.resize(used + 1)
        return slab

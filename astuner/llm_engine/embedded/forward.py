"""What the scheduler asks of a model: extend a key/value cache, and give the logits of one more token.

A cache is plain tensor storage of shape [planes, lanes, heads, capacity, width]: a lane belongs to one sequence,
and position `p` of the sequence lies at index `p` of the capacity axis. How planes, heads and width are used is
the forward's own affair; the scheduler only copies along the capacity axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """Size and place of the cache of one token.

    Attributes:
        planes: leading axis, e.g. keys and values of each layer.
        heads: heads per plane.
        width: numbers per head.
        dtype, device: of the cache tensors.
    """

    planes: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes."""
        return self.planes * self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens to add to one lane.

    Attributes:
        kv: the lane, [planes, heads, capacity, width]; positions before `start` are filled.
        token_ids: the ids at positions `start` and following.
        start: the first position to fill.
    """

    kv: Tensor
    token_ids: Sequence[int]
    start: int


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Lanes of one capacity, each to be given one more token.

    Attributes:
        kv: [planes, n, heads, capacity, width]; lane `i` is filled up to position `len(sequences[i]) - 2`.
        sequences: n lists of token ids; the last id of each is the one not yet in the cache.
        shared: with how many tokens all of them begin alike; all those are in the cache of each lane.
    """

    kv: Tensor
    sequences: Sequence[Sequence[int]]
    shared: int = 0


class Forward(Protocol):
    """A causal language model over such a cache. Used by one thread, in inference mode."""

    @property
    def kv_shape(self) -> KvShape:
        """What one token takes in the cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Write the cache of the chunks' tokens. Each chunk is of another lane."""
        ...

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Write the cache of each sequence's last token and return its logits.

        Returns:
            float32, [lanes of all groups in order, vocab_size]. The caller may overwrite it.
        """
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take new weights: one tensor of the right shape for each of the model's names (tied ones included)."""
        ...

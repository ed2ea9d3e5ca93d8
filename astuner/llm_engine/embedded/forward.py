"""The interface of a model's forward pass over a KV cache: prefill tokens, and decode one more token.

A cache is a tensor of shape [planes, lanes, heads, capacity, width]. A lane belongs to one sequence, and position `p`
of the sequence is at index `p` of the capacity axis. The forward pass defines the meaning of planes, heads and width;
the scheduler only copies along the capacity axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape, dtype and device of one token's cache.

    Attributes:
        planes: leading axis, e.g. keys and values of each layer.
        heads: heads per plane.
        width: elements per head.
        dtype, device: of the cache tensors.
    """

    planes: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes."""
        return self.planes * self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens to append to one lane.

    Attributes:
        kv: the lane, [planes, heads, capacity, width]; positions before `start` are filled.
        token_ids: the ids at positions `start`, `start + 1`, and so on.
        start: the first position to fill.
    """

    kv: Tensor
    token_ids: Sequence[int]
    start: int


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Lanes with equal capacity; one token is appended to each.

    Attributes:
        kv: [planes, n, heads, capacity, width]; lane `i` is filled up to position `len(sequences[i]) - 2`.
        sequences: n lists of token ids; the last id of each is not in the cache yet.
        shared: length of a prefix that all sequences share, which must be in each lane's cache.
    """

    kv: Tensor
    sequences: Sequence[Sequence[int]]
    shared: int = 0


class Forward(Protocol):
    """A causal language model with a KV cache. Used by a single thread, in inference mode."""

    @property
    def kv_shape(self) -> KvShape:
        """Shape of one token's cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        ...

    def extend(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write the chunks' tokens to the cache. Each chunk belongs to a different lane."""
        ...

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Write each sequence's last token to the cache and return its logits.

        Returns:
            [lanes of all groups in order, vocab_size] float32. The caller may overwrite it.
        """
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load new weights: one tensor for each of the model's names, including tied ones."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that it computes with, by the model's names, for `weight_digests`.

        Within blocks of 64 rows, the values may have another order, and zeros among them.
        """
        ...

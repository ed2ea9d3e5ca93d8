"""Weight checksums, which show whether an engine has the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ROWS_PER_BLOCK = 64
"""The number of rows whose sum is a part of a weight's checksum."""
# A part in the dtype that it is rounded to fits into the cache of a core (2 MiB).
_ELEMENTS_PER_PART = 2**19

WeightDigests = Mapping[str, int]
"""The checksum of each weight, by name."""


@torch.no_grad()
def weight_digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return a checksum over each weight's bits.

    The bits are read as 32-bit words, which are added up in blocks of 64 rows, modulo 2^32. The checksum is the sum of
    the blocks, each times a different odd number. So it changes if a word changes, or if blocks are exchanged. The
    order of the words within a block does not matter: kernels reorder them. Computing it takes one pass over the
    weights' memory.

    Args:
        weights: names and tensors.
        dtype: the dtype that floating-point weights are rounded to first; None for their own.
    """
    named = [(name, block_sums(tensor, dtype if tensor.is_floating_point() else None)) for name, tensor in weights]
    sums = [blocks.cpu().numpy() for _, blocks in named]  # all sums are computed before a device is waited for
    factors = 2 * np.arange(max(map(len, sums), default=0)) + 1
    return {name: int((blocks * factors[: len(blocks)]).sum()) for (name, _), blocks in zip(named, sums, strict=True)}


def block_sums(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return each row block's sum of 32-bit words, modulo 2^32, as int32 on the weight's device.

    Args:
        weight: [rows, ...] of any dtype, or a scalar.
        dtype: the dtype that the weight is rounded to first; None for its own.
    """
    rows = weight.detach().reshape(len(weight) if weight.dim() else 1, -1)
    if dtype in (None, rows.dtype):
        return torch.cat(_whole_and_rest(rows))
    blocks = max(_ELEMENTS_PER_PART // max(rows.shape[1], 1) // ROWS_PER_BLOCK, 1)
    parts = torch.split(rows, blocks * ROWS_PER_BLOCK)
    return torch.cat([sums for part in parts for sums in _whole_and_rest(part.to(dtype))])


def _whole_and_rest(rows: Tensor) -> list[Tensor]:
    """Return the sums over the whole blocks in [rows, columns], and over the rows after them."""
    whole = len(rows) // ROWS_PER_BLOCK
    parts = [_sums(rows[: whole * ROWS_PER_BLOCK], whole)] if whole else []
    if len(rows) % ROWS_PER_BLOCK:
        rest = functional.pad(rows[whole * ROWS_PER_BLOCK :], (0, 0, 0, -len(rows) % ROWS_PER_BLOCK))
        parts.append(_sums(rest, 1))
    return parts


def _sums(rows: Tensor, blocks: int) -> Tensor:
    if rows.storage_offset() * rows.element_size() % torch.int32.itemsize:
        rows = rows.clone()
    words = rows.reshape(-1).view(torch.int32)
    return words.view(blocks, -1).sum(1, dtype=torch.int32)


def differing_weights(expected: WeightDigests, found: WeightDigests) -> list[str]:
    """Return the names of the weights that both have and that differ."""
    return [name for name, digest in expected.items() if name in found and found[name] != digest]

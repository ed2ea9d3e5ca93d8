"""Checksums of weights, which show whether an engine has those of the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# A part fits into the cache of a core, also in the dtype that it is rounded to. A multiple of 8.
_ELEMENTS_PER_PART = 2**18
_WORD_BYTES = 8
_WORDS_PER_BLOCK = 64

WeightDigests = Mapping[str, int]
"""The checksum of each weight, by name."""


@torch.no_grad()
def weight_digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return a checksum of the bits of each weight.

    The bits are read as 64-bit words. The checksum is the sum of blocks of words, in which each block has an odd
    number as a factor, so that any change of a word and any exchange of blocks changes it. It takes one pass over the
    memory of the weights, and one integer crosses from the device for each.

    Args:
        weights: names and tensors.
        dtype: the dtype that floating-point weights are rounded to first; None for their own.
    """
    digests = {name: _digest(tensor, dtype if tensor.is_floating_point() else None) for name, tensor in weights}
    return {name: int(digest) for name, digest in digests.items()}


def _digest(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the checksum of a tensor, a scalar int64 on its device."""
    parts = torch.split(tensor.detach().reshape(-1), _ELEMENTS_PER_PART)
    sums = torch.cat([_block_sums(part if dtype is None else part.to(dtype)) for part in parts])
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


def _block_sums(part: Tensor) -> Tensor:
    """Return the sums of the whole blocks of a part, and its further words and bytes, as int64."""
    if part.storage_offset() * part.element_size() % _WORD_BYTES:
        part = part.clone()
    content = part.view(torch.uint8)
    size = len(content) // _WORD_BYTES
    words = content[: size * _WORD_BYTES].view(torch.int64)
    blocks = words[: size // _WORDS_PER_BLOCK * _WORDS_PER_BLOCK].view(-1, _WORDS_PER_BLOCK)
    return torch.cat([blocks.sum(1), words[blocks.numel() :], content[size * _WORD_BYTES :].long()])


def differing_weights(expected: WeightDigests, found: WeightDigests) -> list[str]:
    """Return the names of the weights that both have and that differ."""
    return [name for name, digest in expected.items() if name in found and found[name] != digest]

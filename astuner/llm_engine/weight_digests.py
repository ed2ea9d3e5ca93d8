"""Checksums of weights, which show whether an engine has those of the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ELEMENTS_PER_PART = 2**22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

WeightDigests = Mapping[str, int]
"""The checksum of each weight, by name."""


@torch.no_grad()
def weight_digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return a checksum of the bits of each weight.

    The checksum is the sum of all bit patterns, in which each row has its number as a factor. It takes one pass over
    the memory of the weights, and one integer crosses from the device for each.

    Args:
        weights: names and tensors.
        dtype: the dtype that floating-point weights are rounded to first; None for their own.
    """
    digests = {}
    for name, tensor in weights:
        digests[name] = _digest(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
    return {name: int(digest) for name, digest in digests.items()}


def _digest(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor, a scalar int64 on its device."""
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
    rows = bits.flatten(1) if bits.dim() > 1 else bits.reshape(-1, 1)
    # In parts, because the sum makes a copy of int64 numbers.
    parts = torch.split(rows, max(1, _ELEMENTS_PER_PART // max(1, rows.shape[1])))
    sums = torch.cat([part.sum(1, dtype=torch.int64) for part in parts])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def differing_weights(expected: WeightDigests, found: WeightDigests) -> list[str]:
    """Return the names of the weights that both have and that differ."""
    return [name for name, digest in expected.items() if name in found and found[name] != digest]

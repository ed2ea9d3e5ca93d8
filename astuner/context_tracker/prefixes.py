"""Encoding of token ids as bytes, to find shared prefixes by sorting.

Big-endian bytes sort in the order of the id sequences, so Python's fast comparison of bytes replaces a trie: in sorted
order, a sequence that is another one's prefix is also the next one's, and the number of distinct prefixes is the total
length minus the lengths that neighbours share as prefixes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.schema import LlmCall, Packed, joined

ID_BYTES = 4
_TYPE_CODE = next(code for code in "IL" if array(code).itemsize == ID_BYTES)


def encode(call: LlmCall) -> bytes:
    """Return the call's prompt and completion ids as big-endian bytes, four per id."""
    return encode_ids(joined(call.prompt_ids, call.completion_ids))


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
        The index of each sequence, in sorted order, and its number of new tokens: those after the prefix that it shares
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
    """Return the number of distinct non-empty prefixes over all sequences: the nodes of their trie."""
    return sum(new_tokens for _, new_tokens in in_prefix_order(encoded))

"""Encoding of token ids as bytes, to find shared prefixes by sorting.

Big-endian bytes sort in the order of the id sequences, so Python's fast comparison of bytes replaces a trie: in sorted
order, a sequence that is a prefix of another one is a prefix of the next one, and the number of distinct prefixes is
the total length minus the lengths of the prefixes that neighbours share.
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
    """Return the length, in ids, of the common prefix of two encoded sequences."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // ID_BYTES
    differs = as_ids(left[:size]) != as_ids(right[:size])
    return int(differs.argmax())


def count_distinct_prefixes(encoded: Sequence[bytes]) -> int:
    """Return the number of distinct non-empty prefixes over all sequences: the nodes of their trie."""
    previous = b""
    total = 0
    for sequence in sorted(encoded):
        total += len(sequence) // ID_BYTES - shared_prefix_length(previous, sequence)
        previous = sequence
    return total

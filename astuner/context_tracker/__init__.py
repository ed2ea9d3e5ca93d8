"""Converts the LLM calls of an episode to training samples: pure functions without I/O or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.context_tracker.audit import certificate, count_tokens, response_length
    from astuner.context_tracker.merge import MergeMode, build_samples, limit_samples
    from astuner.context_tracker.packing import (
        ID_BYTES,
        Packing,
        Piece,
        count_distinct_prefixes,
        encode_ids,
        in_prefix_order,
        pack_encoded,
        pack_separate,
        shared_prefix_length,
    )

__all__ = [
    "ID_BYTES",
    "MergeMode",
    "Packing",
    "Piece",
    "build_samples",
    "certificate",
    "count_distinct_prefixes",
    "count_tokens",
    "encode_ids",
    "in_prefix_order",
    "limit_samples",
    "pack_encoded",
    "pack_separate",
    "response_length",
    "shared_prefix_length",
]

# Processes that run episodes merge calls, and the one that trains packs samples.
_MERGE, _AUDIT = ("MergeMode", "build_samples", "limit_samples"), ("certificate", "count_tokens", "response_length")
__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(__all__, "astuner.context_tracker.packing"),
        **dict.fromkeys(_MERGE, "astuner.context_tracker.merge"),
        **dict.fromkeys(_AUDIT, "astuner.context_tracker.audit"),
    },
)

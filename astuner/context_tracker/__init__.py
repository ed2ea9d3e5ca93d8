"""Converts the LLM calls of an episode to training samples: pure functions without I/O or PyTorch."""

from astuner.context_tracker.audit import certificate, count_tokens, response_length
from astuner.context_tracker.merge import MergeMode, build_samples, limit_samples
from astuner.context_tracker.packing import Packing, Piece, pack, pack_encoded, pack_separate
from astuner.context_tracker.prefixes import (
    ID_BYTES,
    count_distinct_prefixes,
    encode_ids,
    in_prefix_order,
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
    "pack",
    "pack_encoded",
    "pack_separate",
    "response_length",
    "shared_prefix_length",
]

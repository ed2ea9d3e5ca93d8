"""From the calls of an episode to training samples: pure, no I/O, no torch."""

from astuner.context_tracker.audit import certificate, count_tokens
from astuner.context_tracker.merge import MergeMode, build_samples, limit_samples
from astuner.context_tracker.packing import Packing, Piece, pack

__all__ = ["MergeMode", "Packing", "Piece", "build_samples", "certificate", "count_tokens", "limit_samples", "pack"]

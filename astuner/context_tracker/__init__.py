"""From the calls of an episode to training samples: pure, no I/O, no torch."""

from astuner.context_tracker.audit import certificate, count_tokens
from astuner.context_tracker.merge import MergeMode, build_samples, limit_samples

__all__ = ["MergeMode", "build_samples", "certificate", "count_tokens", "limit_samples"]

"""Converts the LLM calls of an episode to training samples: pure functions without I/O or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astuner.doors import lazy_names

if TYPE_CHECKING:
    from astuner.context_tracker.audit import certificate

__all__ = ["certificate"]

# Processes that run episodes merge calls, and need no check of the samples.
__getattr__ = lazy_names(__name__, {"certificate": "astuner.context_tracker.audit"})

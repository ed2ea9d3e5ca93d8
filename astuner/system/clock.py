"""Timestamps that do not jump if the system's clock is changed while the process runs, and texts of durations."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def timestamp() -> float:
    """Return the time in seconds since the epoch, without changes of the system's clock since the process started.

    Timestamps of one process never decrease, and their differences are durations.
    """
    return _OFFSET + time.monotonic()


def duration_text(seconds: float) -> str:
    """Return a duration as minutes and seconds (3:20) or hours, minutes and seconds (1:02:03)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

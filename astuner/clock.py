"""Timestamps that do not jump if the system's clock is changed while the process runs."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def timestamp() -> float:
    """Return the time in seconds since the epoch, without changes of the system's clock since the process started.

    Timestamps of one process never decrease, and their differences are durations.
    """
    return _OFFSET + time.monotonic()

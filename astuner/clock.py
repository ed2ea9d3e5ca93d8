"""Timestamps whose differences are durations, even if the system's clock is set while the process runs."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.monotonic()


def timestamp() -> float:
    """Return the time in seconds since the epoch, as if the system's clock had not been set since the process started.

    Timestamps of one process never decrease. Those of two processes differ like the clocks at their starts.
    """
    return _OFFSET + time.monotonic()

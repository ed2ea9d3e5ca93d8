"""The return of freed memory to the operating system."""

from __future__ import annotations

import ctypes

import psutil

# Smaller processes keep freed memory, because page faults would cost more time than the memory is worth.
_WORTH_RETURNING = 2**30


def return_free_memory() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed blocks of up to 32 MiB. Rollout, micro-batches, optimizer and sync allocate blocks with different
    sizes, so the process would hold their peaks' sum instead of the highest peak.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None and psutil.Process().memory_info().rss > _WORTH_RETURNING:
        trim(0)

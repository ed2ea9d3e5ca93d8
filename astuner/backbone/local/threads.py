"""How many threads PyTorch computes with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import torch

_LEAST_SECONDS = 0.5


class SpareCores:
    """Computes on the cores that other processes leave.

    An operation ends when its slowest thread does. A thread that has to wait for a core holds up all others, so that
    two runs of two threads each on two cores take three times as long as two of one thread.
    """

    def __init__(self) -> None:
        self._most = torch.get_num_threads()
        self._process = psutil.Process()
        self._seconds = self._worked = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compute from the end of the block on with as many threads as there were cores to spare during it."""
        before = self._measured()
        yield
        after = self._measured()
        self._seconds += after[0] - before[0]
        self._worked += after[1] - before[1]
        # The system counts hundredths of seconds: what short blocks say is added up.
        if self._seconds >= _LEAST_SECONDS:
            spare = (psutil.cpu_count() or self._most) - max(self._worked / self._seconds, 0.0)
            torch.set_num_threads(min(max(round(spare), 1), self._most))
            self._seconds = self._worked = 0.0

    def _measured(self) -> tuple[float, float]:
        """Return the time, and the seconds that cores have worked for others than this process and its children."""
        everyone, own = psutil.cpu_times(), self._process.cpu_times()
        worked = everyone.user + everyone.system + getattr(everyone, "nice", 0.0)
        return time.monotonic(), worked - own.user - own.system - own.children_user - own.children_system

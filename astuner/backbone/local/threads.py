"""How many threads PyTorch computes with."""

from __future__ import annotations

import time

import psutil
import torch


class SpareCores:
    """Computes on the cores that other processes leave.

    An operation ends when its slowest thread does. A thread that has to wait for a core holds up all others, so that
    two runs of two threads each on two cores take three times as long as two of one thread.
    """

    def __init__(self) -> None:
        self._most = torch.get_num_threads()
        self._process = psutil.Process()
        self._last = self._measured()

    def use(self) -> int:
        """Compute with as many threads as there were cores to spare since the last call; return how many."""
        now, before = self._measured(), self._last
        if now[0] - before[0] < 0.1:  # too short: the system counts hundredths of seconds
            return torch.get_num_threads()
        self._last = now
        others = max((now[1] - before[1]) / (now[0] - before[0]), 0.0)
        spare = (psutil.cpu_count() or self._most) - others
        threads = min(max(round(spare), 1), self._most)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return threads

    def _measured(self) -> tuple[float, float]:
        """Return the time, and the seconds that cores have worked for others than this process and its children."""
        everyone, own = psutil.cpu_times(), self._process.cpu_times()
        worked = everyone.user + everyone.system + getattr(everyone, "nice", 0.0)
        return time.monotonic(), worked - own.user - own.system - own.children_user - own.children_system

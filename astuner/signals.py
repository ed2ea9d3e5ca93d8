"""Handlers of the process's signals, for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def signals_handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for some signals during the block, in the main thread, and put back what was there.

    A signal whose handler was not installed from Python, which could not be put back, is left alone.
    """
    before = {number: old for number in numbers if (old := signal.getsignal(number)) is not None}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

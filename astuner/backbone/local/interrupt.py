"""Ctrl-C between training steps, never inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Raise a SIGINT that comes during the block at its end, so that weights and step count stay in agreement."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[bool] = []

    def remember(_signal: int, _frame: FrameType | None) -> None:
        came.append(True)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt

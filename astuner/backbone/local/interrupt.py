"""Ctrl-C and its like between training steps, never inside one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Let a signal that comes during the block take effect at its end, so that weights and record stay in agreement."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    # None stands for a handler that was not installed from Python, which could not be put back.
    handlers = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) is not None}
    for number in handlers:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])

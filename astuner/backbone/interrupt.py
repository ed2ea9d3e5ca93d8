"""Ctrl-C and its like between training steps, never inside one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from astuner.signals import signals_handled

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Let a signal that comes during the block take effect at its end, so that weights and record stay in agreement."""
    came: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    with signals_handled(_SIGNALS, remember):
        yield
    if came:
        signal.raise_signal(came[0])

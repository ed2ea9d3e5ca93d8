"""Handlers of the process's signals, for a while."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

_SECONDS_OF_IMPATIENCE = 3.0


def answer_usr1() -> None:
    """Have SIGUSR1 say from now on where the main thread is, instead of ending the process.

    For a command as it starts; once a run does, `report_on_usr1` says more.
    """

    def answer(_number: int, frame: FrameType | None) -> None:
        import traceback  # not before it is wanted: the command starts with this

        stack = "".join(traceback.format_stack(frame))
        # Not through `sys.stderr`, which the main thread may be in the midst of writing to.
        os.write(2, f"no episode runs; the main thread is at\n{stack}".encode())

    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, answer)


def report_on_usr1(report: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Have SIGUSR1 call `report` during the block, in a thread of its own.

    So it may log: the main thread could hold the log's lock at the moment of the signal.
    """

    def start(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=report, name="report", daemon=True).start()

    return signals_handled([signal.SIGUSR1], start)


@contextlib.contextmanager
def signals_handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for some signals during the block, and put back what was there.

    Only the main thread can; in any other, nothing is installed. A signal whose handler was not installed from Python,
    which could not be put back, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: old for number in numbers if (old := signal.getsignal(number)) is not None}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Terminated(KeyboardInterrupt):
    """The process was told to end, by Ctrl-C or otherwise."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


@contextlib.contextmanager
def orderly_end_on(*numbers: int) -> Iterator[Sequence[int]]:
    """Have the signals raise `Terminated` in the main thread, but for those that are ignored (`nohup`).

    The block is given the numbers of those that came.

    What comes right after one, as of somebody who holds Ctrl-C down, does not disturb the saving that it began.
    """
    latest = -math.inf
    received: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal latest
        if time.monotonic() - latest < _SECONDS_OF_IMPATIENCE:
            return
        latest = time.monotonic()
        received.append(number)
        raise Terminated(number)

    ordinary = (signal.SIG_DFL, signal.default_int_handler)
    with signals_handled([number for number in numbers if signal.getsignal(number) in ordinary], end):
        yield received

"""Temporary handlers of the process's signals."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

# A signal this many seconds after the last one is ignored: it comes from a user who holds Ctrl-C down.
_REPEAT_SECONDS = 3.0


def print_stack_on_usr1() -> None:
    """Print the main thread's stack on SIGUSR1 instead of ending the process.

    Used while a command starts. During a run, `report_on_usr1` replaces it and prints more.
    """

    def print_stack(_number: int, frame: FrameType | None) -> None:
        import traceback  # Imported late: every command calls this function at its start.

        stack = "".join(traceback.format_stack(frame))
        # Not through `sys.stderr`: the signal may interrupt the main thread while it writes there.
        os.write(2, f"no episode runs; the main thread is at\n{stack}".encode())

    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, print_stack)


def report_on_usr1(report: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Call `report` on SIGUSR1 during the block.

    It runs in a new thread, so that it may log: the main thread may hold the lock of the log when the signal arrives.
    """

    def start(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=report, name="report", daemon=True).start()

    return signal_handlers([signal.SIGUSR1], start)


@contextlib.contextmanager
def signal_handlers(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for some signals during the block and restore the earlier handlers afterwards.

    Does nothing outside the main thread. A signal whose handler was not installed from Python is skipped, because its
    handler could not be restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: old for number in numbers if (old := signal.getsignal(number)) is not None}
    for number in earlier:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block, so that they cannot interrupt it."""
    received: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    with signal_handlers((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), remember):
        yield
    if received:
        signal.raise_signal(received[0])


class Terminated(KeyboardInterrupt):
    """Raised in the main thread when Ctrl-C or another signal requests the process to exit."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


@contextlib.contextmanager
def terminate_on(*numbers: int) -> Iterator[Sequence[int]]:
    """Raise `Terminated` in the main thread on these signals, except for signals that are ignored (`nohup`).

    Yields the list of the signals received so far. A signal within 3 seconds of the previous signal is dropped, so
    that it does not interrupt the shutdown.
    """
    latest = -math.inf
    received: list[int] = []

    def terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal latest
        if time.monotonic() - latest < _REPEAT_SECONDS:
            return
        latest = time.monotonic()
        received.append(number)
        raise Terminated(number)

    ordinary = (signal.SIG_DFL, signal.default_int_handler)
    with signal_handlers([number for number in numbers if signal.getsignal(number) in ordinary], terminate):
        yield received

"""Handlers of the process's signals, for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


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

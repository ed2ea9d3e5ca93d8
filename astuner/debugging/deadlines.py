"""Deadlines that log the stack of the code that misses them, even if that code blocks its thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from time import monotonic  # an episode that replaces `time.monotonic` must not end the clock's thread

from loguru import logger

from astuner.debugging.breakpoints import is_debugged
from astuner.debugging.tracebacks import format_stack, task_stack

CLOCK_THREAD = "deadlines"
"""Name of the alarms' thread. A fork of the process starts another one."""

# Seconds after a deadline in which an event loop that is not blocked logs the stack itself.
_EVENT_LOOP_GRACE = 0.5


@dataclass(eq=False)
class _Alarm:
    due: float
    seconds: float
    callback: Callable[[float], None]
    repeat: bool
    start: float


class _Clock:
    """One thread that runs all alarm callbacks in the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: set[_Alarm] = set()
        self._thread: threading.Thread | None = None

    def add(self, alarm: _Alarm) -> None:
        with self._changed:
            self._alarms.add(alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=CLOCK_THREAD, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, alarm: _Alarm) -> None:
        with self._changed:
            self._alarms.discard(alarm)

    def _run(self) -> None:
        while True:
            for alarm in self._wait_for_due():
                if is_debugged():
                    continue
                try:
                    alarm.callback(monotonic() - alarm.start)
                except Exception:  # the other alarms must still be called
                    logger.exception("an alarm failed after {:g} s", alarm.seconds)

    def _wait_for_due(self) -> list[_Alarm]:
        with self._changed:
            earliest = min((alarm.due for alarm in self._alarms), default=None)
            self._changed.wait(None if earliest is None else max(0.0, earliest - monotonic()))
            now = monotonic()
            due = [alarm for alarm in self._alarms if alarm.due <= now]
            for alarm in due:
                if alarm.repeat:
                    # Several multiples that have passed count as one.
                    alarm.due += alarm.seconds * math.ceil((now - alarm.due + 1e-9) / alarm.seconds)
                else:
                    self._alarms.remove(alarm)
            return due


_clock = _Clock()


def _restart_clock() -> None:
    """Replace the clock in a fork, which does not have its thread."""
    global _clock  # noqa: PLW0603 it belongs to the whole process
    _clock = _Clock()


os.register_at_fork(after_in_child=_restart_clock)


@contextlib.contextmanager
def alarm(seconds: float | None, callback: Callable[[float], None], *, repeat: bool = False) -> Iterator[None]:
    """Call `callback` in another thread if the block takes longer than `seconds`. Does nothing in a debugged process.

    Args:
        seconds: None for no limit.
        callback: Receives the seconds that have passed since the start of the block.
        repeat: Also call it at each further multiple of `seconds`.
    """
    if seconds is None:
        yield
        return
    now = monotonic()
    entry = _Alarm(now + seconds, seconds, callback, repeat, now)
    _clock.add(entry)
    try:
        yield
    finally:
        _clock.remove(entry)


@contextlib.contextmanager
def log_if_late(
    seconds: float | None, message: Callable[[], str], task: asyncio.Task[object] | None = None
) -> Iterator[None]:
    """Log the stack of a task, once, if the block takes longer than `seconds`.

    The task's event loop logs it, before a timeout at the same moment cancels the task. If the task blocks the event
    loop, another thread logs it half a second later.

    Args:
        seconds: The time limit; None for no limit.
        message: Returns the text above the stack.
        task: A task of the running event loop; None for the current task.
    """
    if seconds is None:
        yield
        return
    task, thread, once = task or asyncio.current_task(), threading.current_thread(), threading.Lock()
    assert task is not None

    def log(*, is_blocking: bool) -> None:
        if not once.acquire(blocking=False):
            return
        # Worker processes, which are replaced, have no handler.
        is_run = thread is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_DFL
        only = ", which only Ctrl-C ends" if is_run else ""
        write = logger.warning if is_blocking else logger.debug
        text = f"{message()}; it blocks its thread{only}" if is_blocking else message()
        write("{}; its stack:\n{}", text, format_stack(task_stack(task, thread)))

    from_loop = asyncio.get_running_loop().call_later(seconds, lambda: log(is_blocking=False))
    with alarm(seconds + _EVENT_LOOP_GRACE, lambda _: log(is_blocking=True)):
        try:
            yield
        finally:
            from_loop.cancel()


@contextlib.asynccontextmanager
async def deadline(seconds: float | None, message: Callable[[], str]) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout` that logs the task's stack before the task is cancelled; arguments as for `log_if_late`."""
    with log_if_late(seconds, message):
        async with asyncio.timeout(seconds) as timeout:
            yield timeout

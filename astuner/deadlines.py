"""Deadlines that say where things stand when they pass, also where what is late holds its thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from loguru import logger

from astuner.breakpoints import is_debugged
from astuner.stacks import shown, task_stack

# An event loop that lives has told of a deadline by then.
_A_MOMENT = 0.5


@dataclass(eq=False)
class _Alarm:
    due: float
    seconds: float
    ring: Callable[[float], None]
    again: bool
    began: float


class _Clock:
    """One thread that rings all alarms of the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: set[_Alarm] = set()
        self._thread: threading.Thread | None = None

    def add(self, alarm: _Alarm) -> None:
        with self._changed:
            self._alarms.add(alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, alarm: _Alarm) -> None:
        with self._changed:
            self._alarms.discard(alarm)

    def _run(self) -> None:
        while True:
            for alarm in self._due():
                if not is_debugged():
                    alarm.ring(time.monotonic() - alarm.began)

    def _due(self) -> list[_Alarm]:
        with self._changed:
            next_one = min((alarm.due for alarm in self._alarms), default=None)
            self._changed.wait(None if next_one is None else max(0.0, next_one - time.monotonic()))
            now = time.monotonic()
            due = [alarm for alarm in self._alarms if alarm.due <= now]
            for alarm in due:
                if alarm.again:
                    # Multiples that went by meanwhile are one.
                    alarm.due += alarm.seconds * math.ceil((now - alarm.due + 1e-9) / alarm.seconds)
                else:
                    self._alarms.remove(alarm)
            return due


_clock = _Clock()


@contextlib.contextmanager
def rung(seconds: float | None, ring: Callable[[float], None], *, again: bool = False) -> Iterator[None]:
    """Have `ring` called in another thread if the block takes longer than `seconds`; not in a debugged process.

    Args:
        seconds: None for never.
        ring: is given the seconds that the block has taken.
        again: call it at each further multiple, too.
    """
    if seconds is None:
        yield
        return
    now = time.monotonic()
    alarm = _Alarm(now + seconds, seconds, ring, again, now)
    _clock.add(alarm)
    try:
        yield
    finally:
        _clock.remove(alarm)


@contextlib.contextmanager
def told(seconds: float | None, late: Callable[[], str], task: asyncio.Task[object] | None = None) -> Iterator[None]:
    """Leave in the log, once, where a task stands when the block takes longer than `seconds`.

    A task that waits is told of by its own event loop, before any timeout of that very moment unwinds it; one that
    holds its thread, half a second later from another one.

    Args:
        seconds: None for never.
        late: what to say above the stack.
        task: of the running loop; None for the current one.
    """
    if seconds is None:
        yield
        return
    task, thread, once = task or asyncio.current_task(), threading.current_thread(), threading.Lock()
    assert task is not None

    def say(*, holds: bool) -> None:
        if not once.acquire(blocking=False):
            return
        only = ", which only Ctrl-C ends" if thread is threading.main_thread() else ""
        log = logger.warning if holds else logger.debug
        said = f"{late()}; it holds its thread{only}" if holds else late()
        log("{}; it stood at\n{}", said, shown(task_stack(task, thread)))

    from_loop = asyncio.get_running_loop().call_later(seconds, lambda: say(holds=False))
    with rung(seconds + _A_MOMENT, lambda _: say(holds=True)):
        try:
            yield
        finally:
            from_loop.cancel()


@contextlib.asynccontextmanager
async def deadline(seconds: float | None, late: Callable[[], str]) -> AsyncIterator[asyncio.Timeout]:
    """Be `asyncio.timeout`, and leave the stack of the task in the log before the task is cancelled.

    Args:
        seconds: what the block may take; None for as long as it wants.
        late: what to say above the stack.
    """
    with told(seconds, late):
        async with asyncio.timeout(seconds) as timeout:
            yield timeout

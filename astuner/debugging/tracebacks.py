"""Stacks of threads and asyncio tasks, for reports on code that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from astuner.errors import describe_error, leaf_exceptions

_PACKAGE = f"{Path(__file__).parents[1]}/"
_MAX_FRAMES = 100
_MAX_TRACEBACK = 20_000

Stack = tuple[traceback.FrameSummary, ...]
"""Frames of a stack, the innermost last."""


_awaited_threads: weakref.WeakKeyDictionary[asyncio.Task[object], threading.Thread] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def waits_for_thread(thread: threading.Thread) -> Iterator[None]:
    """Append the stack of `thread`, for which the current task waits in the block, to the task's stack."""
    task = asyncio.current_task()
    assert task is not None
    _awaited_threads[task] = thread
    try:
        yield
    finally:
        del _awaited_threads[task]


def thread_stack(thread: threading.Thread) -> Stack:
    """Return the stack of a thread; empty if the thread has ended."""
    frame = sys._current_frames().get(thread.ident) if thread.ident else None
    return tuple(traceback.extract_stack(frame)) if frame else ()


def task_stack(task: asyncio.Task[object], thread: threading.Thread) -> Stack:
    """Return the stack of a task.

    The stack of a waiting task is followed from coroutine to coroutine down to the innermost awaitable
    (`Task.get_stack` returns the outermost frame only). A running task's stack is its thread's. If the task waits for a
    thread (`waits_for_thread`), that thread's stack is appended. `thread` runs the task's event loop, and may differ
    from the calling thread.
    """
    if asyncio.current_task(task.get_loop()) is task:
        stack = thread_stack(thread)
        # The task's own frames follow the innermost `Handle._run` of the event loop.
        steps = [i for i, f in enumerate(stack) if f.name == "_run" and f.filename == asyncio.events.__file__]
        return stack[steps[-1] + 1 :] if steps else stack
    awaited_thread = _awaited_threads.get(task)
    return _coroutine_stack(task.get_coro()) + (thread_stack(awaited_thread) if awaited_thread else ())


def format_stack(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return a stack in the format of a traceback."""
    return "".join(traceback.format_list(list(stack))).rstrip() or "  (empty: it has just ended)"


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception, even if its class overrides `__traceback__`."""
    attribute: Any = BaseException.__traceback__
    traceback_: TracebackType | None = attribute.__get__(error)
    return traceback_


def error_stack(error: BaseException) -> Stack:
    """Return the frames in an exception's traceback, at most the innermost 100; for a group, its first part's."""
    # The cause, because Python replaces the StopIteration of a coroutine by an error without a traceback.
    cause: Any = BaseException.__cause__
    for part in (*leaf_exceptions(error), error, cause.__get__(error)):
        if part is not None and (innermost := traceback_of(part)) is not None:
            return tuple(traceback.extract_tb(innermost, limit=-_MAX_FRAMES))
    return ()


def format_error(error: BaseException) -> str:
    """Return the traceback for an exception in user code, with its causes, cut to 20,000 characters. Never raises.

    The middle of a long text is left out.
    """
    try:
        lines = traceback.format_exception(type(error), error, traceback_of(error), limit=-_MAX_FRAMES)
        text = "".join(lines)
    except BaseException:  # for example, groups that are nested too deeply
        text = f"{format_stack(error_stack(error))}\n{describe_error(error)}"
    if len(text) > _MAX_TRACEBACK:
        left_out = len(text) - _MAX_TRACEBACK
        text = f"{text[: _MAX_TRACEBACK // 4]}\n… {left_out:,} characters …\n{text[-_MAX_TRACEBACK * 3 // 4 :]}"
    return text.rstrip()


def _coroutine_stack(awaitable: object) -> Stack:
    frames: list[tuple[FrameType, int]] = []
    while awaitable is not None:
        # Coroutines, generators and asynchronous generators have the same two attributes under different prefixes.
        prefix = next((prefix for prefix in ("cr", "gi", "ag") if hasattr(awaitable, f"{prefix}_frame")), None)
        if prefix is None:  # For example a future.
            break
        frame = getattr(awaitable, f"{prefix}_frame")
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        awaitable = getattr(awaitable, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
    return tuple(traceback.StackSummary.extract(iter(frames)))


def error_location(error: BaseException) -> str:
    """Return ` (at FILE:LINE, in FUNCTION)` for an exception of the user's code; "" if it has no traceback."""
    frames = error_stack(error)
    if not frames:
        return ""
    frame = innermost_user_frame(frames) or frames[-1]
    return f" (at {frame.filename}:{frame.lineno}, in {frame.name})"


def innermost_user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame outside astuner and installed packages, or None."""
    foreign = (_PACKAGE, sysconfig.get_path("stdlib"), "<frozen")
    user_frames = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(foreign)]
    return user_frames[-1] if user_frames else None

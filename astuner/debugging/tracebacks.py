"""Stacks of threads and asyncio tasks, for reports of code that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType

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
    (`Task.get_stack` returns the outermost frame only). If the task runs, its stack is that of its thread; if it waits
    for a thread (`waits_for_thread`), the stack of that thread is appended.

    Args:
        task: The task.
        thread: The thread of the task's event loop; may differ from the calling thread.
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

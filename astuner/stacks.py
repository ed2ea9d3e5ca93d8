"""Where threads and asyncio tasks stand, for whoever looks for what hangs."""

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
"""Frames, the innermost last."""


_helpers: weakref.WeakKeyDictionary[asyncio.Task[object], threading.Thread] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def waiting_for(thread: threading.Thread) -> Iterator[None]:
    """Let the current task's stack go on with that of a thread that it waits for in the block."""
    task = asyncio.current_task()
    assert task is not None
    _helpers[task] = thread
    try:
        yield
    finally:
        del _helpers[task]


def thread_stack(thread: threading.Thread) -> Stack:
    """Return where a thread stands; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident) if thread.ident else None
    return tuple(traceback.extract_stack(frame)) if frame else ()


def task_stack(task: asyncio.Task[object], thread: threading.Thread) -> Stack:
    """Return where a task of an event loop stands that runs in `thread`, which may be another one than the caller's.

    A task that waits is followed from coroutine to coroutine down to what it awaits. (`Task.get_stack` gives the
    outermost only.) One that blocks its thread stands where the thread does, and one that waits for a thread
    (`waiting_for`) where that thread stands.
    """
    if asyncio.current_task(task.get_loop()) is task:
        stack = thread_stack(thread)
        inside = [place for place, frame in enumerate(stack) if _runs_a_task(frame)]
        return stack[inside[-1] + 1 :] if inside else stack
    helper = _helpers.get(task)
    return _awaited(task.get_coro()) + (thread_stack(helper) if helper else ())


def shown(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return a stack as a traceback shows it."""
    return "".join(traceback.format_list(list(stack))).rstrip() or "  (nothing: it has just ended)"


def _runs_a_task(frame: traceback.FrameSummary) -> bool:
    return frame.name == "_run" and frame.filename == asyncio.events.__file__


def _awaited(awaitable: object) -> Stack:
    frames: list[tuple[FrameType, int]] = []
    while awaitable is not None:
        # Coroutines, generators and asynchronous generators have the same two attributes under prefixes of their own.
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaitable, f"{kind}_frame")), None)
        if kind is None:  # a future, say
            break
        frame = getattr(awaitable, f"{kind}_frame")
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        awaitable = getattr(awaitable, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return tuple(traceback.StackSummary.extract(iter(frames)))

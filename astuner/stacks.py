"""Where threads and asyncio tasks stand, for whoever looks for what hangs."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType

Stack = tuple[traceback.FrameSummary, ...]
"""Frames, the innermost last."""


def thread_stack(thread: threading.Thread) -> Stack:
    """Return where a thread stands; empty if it has ended."""
    frame = sys._current_frames().get(thread.ident) if thread.ident else None
    return tuple(traceback.extract_stack(frame)) if frame else ()


def task_stack(task: asyncio.Task[object], thread: threading.Thread) -> Stack:
    """Return where a task of an event loop stands that runs in `thread`, which may be another one than the caller's.

    A task that waits is followed from coroutine to coroutine down to what it awaits. (`Task.get_stack` gives the
    outermost only.) One that blocks its thread stands where the thread does.
    """
    if asyncio.current_task(task.get_loop()) is task:
        stack = thread_stack(thread)
        inside = [place for place, frame in enumerate(stack) if _runs_a_task(frame)]
        return stack[inside[-1] + 1 :] if inside else stack
    return _awaited(task.get_coro())


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

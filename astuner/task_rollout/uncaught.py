"""An episode's uncaught exceptions, in its tasks, callbacks, threads and finalisers."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import gc
import sys
import threading
from bdb import BdbQuit
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from loguru import logger

from astuner.debugging.tracebacks import error_location, format_error
from astuner.errors import describe_error


@dataclass(frozen=True, slots=True)
class UncaughtError:
    """An exception that an episode did not catch, as text, because its objects may belong to the user's code.

    Attributes:
        text: type, message and location.
        is_internal: whether astuner raised it, not the user's code.
    """

    text: str
    traceback: str
    is_internal: bool


class UncaughtErrors:
    """Collects the uncaught exceptions of one episode. Thread-safe."""

    def __init__(self) -> None:
        self._errors: list[UncaughtError] = []
        self._seen: list[BaseException] = []
        self._is_closed = False
        self.quits_debugger = False

    def add(self, error: BaseException, where: str, *, is_internal: bool = False) -> None:
        """Add an exception that `where`, such as `a callback`, raised, unless known. After `close`, log it instead."""
        if any(error is seen for seen in self._seen):
            return
        if issubclass(type(error), BdbQuit):
            self.quits_debugger = True
        text = f"{describe_error(error)}{error_location(error)}, in {where}"
        uncaught = UncaughtError(text, format_error(error), is_internal)
        if self._is_closed:
            logger.warning("{}, after its episode had ended", uncaught.text)
            logger.debug("its traceback:\n{}", uncaught.traceback)
            return
        self._seen.append(error)
        self._errors.append(uncaught)

    def close(self) -> tuple[UncaughtError, ...]:
        """Return the exceptions. Later exceptions are logged."""
        self._is_closed = True
        self._seen.clear()
        return tuple(self._errors)


_current: ContextVar[UncaughtErrors | None] = ContextVar("astuner_uncaught_errors", default=None)
# The attribute of a thread with the `UncaughtErrors` of the episode that started it. A thread has its own context.
_OF_THREAD = "astuner_uncaught_errors"


def _of_caller() -> UncaughtErrors | None:
    """Return the collector of the caller's episode; None outside an episode."""
    return _current.get() or getattr(threading.current_thread(), _OF_THREAD, None)


@contextlib.contextmanager
def collect_uncaught() -> Iterator[UncaughtErrors]:
    """Collect the uncaught exceptions from the episode that the block runs, its threads included."""
    uncaught = UncaughtErrors()
    token = _current.set(uncaught)
    try:
        yield uncaught
    finally:
        _current.reset(token)


class _Hooks:
    """Replaces the process's hooks for uncaught exceptions while an episode runs."""

    def __init__(self) -> None:
        # Ids of the threads that collect garbage, whose finalisers may belong to an earlier episode.
        self._collecting: set[int] = set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Install the hooks during the block."""
        start_thread = threading.Thread.start
        self._excepthook, self._unraisablehook = threading.excepthook, sys.unraisablehook

        def start(thread: threading.Thread) -> None:
            if (uncaught := _of_caller()) is not None:
                setattr(thread, _OF_THREAD, uncaught)
                # The interpreter waits at its exit for other threads, and a thread of an episode may never end.
                with contextlib.suppress(RuntimeError):  # `start` reports a thread that has been started before
                    thread.daemon = True
            start_thread(thread)

        threading.Thread.start = start  # type: ignore[method-assign, assignment]
        threading.excepthook = self._on_thread_error
        sys.unraisablehook = self._on_unraisable
        gc.callbacks.append(self._on_garbage_collection)
        try:
            yield
        finally:
            threading.Thread.start = start_thread  # type: ignore[method-assign]
            threading.excepthook, sys.unraisablehook = self._excepthook, self._unraisablehook
            gc.callbacks.remove(self._on_garbage_collection)
            # The interpreter waits at its exit for the threads of executors, daemonic or not.
            queues: Any = concurrent.futures.thread._threads_queues
            for thread in [thread for thread in list(queues) if hasattr(thread, _OF_THREAD)]:
                queues.pop(thread, None)

    def _on_thread_error(self, args: Any) -> None:
        uncaught: UncaughtErrors | None = getattr(args.thread, _OF_THREAD, None)
        if uncaught is None or args.exc_value is None:
            self._excepthook(args)
        else:
            uncaught.add(args.exc_value, "a thread")

    def _on_unraisable(self, args: Any) -> None:
        uncaught = None if threading.get_ident() in self._collecting else _of_caller()
        if uncaught is None or args.exc_value is None:
            self._unraisablehook(args)
        else:
            uncaught.add(args.exc_value, "a finaliser")

    def _on_garbage_collection(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._collecting.add(threading.get_ident())
        else:
            self._collecting.discard(threading.get_ident())


hooks = _Hooks()
"""The hooks of this process."""

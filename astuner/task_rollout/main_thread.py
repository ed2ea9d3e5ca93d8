"""Episodes one after another in the thread that asks for them, where breakpoints stop the whole run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Generic, TypeVar

from astuner.signals import signals_handled
from astuner.task_rollout.leftovers import without_leftovers

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class MainThread(Generic[T]):
    """Runs coroutines one after another on an event loop in the caller's thread.

    Nothing can end one that blocks, but Ctrl-C.
    """

    def run(self, makers: Sequence[Callable[[], Coroutine[object, object, T]]]) -> Iterator[tuple[int, T]]:
        """Yield `(index, result)`, in order.

        Raises:
            BaseException: whatever a job raised.
        """
        with asyncio.Runner() as runner:
            for index, make in enumerate(makers):
                with _interrupting():
                    result = runner.run(without_leftovers(make()))
                yield index, result

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Let a signal end the run, though it strikes inside a workflow, whose every exception is a failed episode."""
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    with signals_handled(_SIGNALS, interrupt):
        try:
            yield
        except KeyboardInterrupt:
            if not came:
                raise
    if came:
        signal.raise_signal(came[0])

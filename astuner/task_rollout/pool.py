"""Worker threads for episodes.

Each worker has its own event loop, so a workflow that blocks (a synchronous HTTP client, a sleep) delays no
other episode, and one that never comes back costs its thread and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from astuner.breakpoints import is_debugged
from astuner.stacks import Stack, thread_stack
from astuner.task_rollout.leftovers import without_leftovers

T = TypeVar("T")

# What an episode may take beyond its own asyncio deadline before its thread is given up.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5


@dataclass(eq=False)
class _Job(Generic[T]):
    make: Callable[[], Coroutine[object, object, T]]
    index: int
    started: float | None = None
    thread: threading.Thread | None = None
    abandoned: bool = False


@dataclass(frozen=True)
class Stuck:
    """What stands in for the result of a job whose thread was given up.

    Attributes:
        seconds: how long it had run.
        stack: where its thread stood, the innermost frame last; empty if the thread has ended.
    """

    seconds: float
    stack: Stack


@dataclass
class EpisodePool(Generic[T]):
    """Runs coroutines, at most `workers` at a time, each on a thread of its own.

    Attributes:
        workers: the most jobs at the same time.
        deadline: seconds after which a job that blocks its thread is given up, unless the process is debugged.
    """

    workers: int
    deadline: float
    _jobs: queue.SimpleQueue[_Job[T] | None] = field(default_factory=queue.SimpleQueue)
    _done: queue.SimpleQueue[tuple[_Job[T], T | BaseException]] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def run(self, makers: Sequence[Callable[[], Coroutine[object, object, T]]]) -> Iterator[tuple[int, T | Stuck]]:
        """Yield `(index, result)` as jobs end, in that order.

        Raises:
            BaseException: whatever a job raised; jobs are expected to turn their own failures into results.
        """
        jobs = [_Job(make, index) for index, make in enumerate(makers)]
        for _ in range(min(self.workers, len(jobs)) - len(self._threads)):
            self._start_worker()
        for job in jobs:
            self._jobs.put(job)
        pending = set(jobs)
        while pending:
            for job, stuck in self._stuck(pending):
                pending.discard(job)
                yield job.index, stuck
            try:
                job, result = self._done.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if job not in pending:  # given up earlier, or of a run that was interrupted
                continue
            pending.discard(job)
            if isinstance(result, BaseException):
                raise result
            yield job.index, result

    def close(self) -> None:
        """Forget the jobs that wait, and end the idle workers; busy ones are daemons and end with the process."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        # A thread that is ending while the interpreter does can take the process down in C++ code of libraries.
        patience = time.monotonic() + _POLL_SECONDS
        for thread in self._threads:
            thread.join(max(patience - time.monotonic(), 0.0))
        self._threads.clear()

    def _start_worker(self) -> None:
        thread = threading.Thread(target=self._work, name=f"episode-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (job := self._jobs.get()) is not None:
                job.thread = threading.current_thread()
                job.started = time.monotonic()
                result: T | BaseException
                try:
                    result = runner.run(without_leftovers(job.make()))
                except BaseException as error:
                    result = error
                self._done.put((job, result))
                if job.abandoned:  # a replacement was started for this worker
                    return

    def _stuck(self, pending: set[_Job[T]]) -> list[tuple[_Job[T], Stuck]]:
        if is_debugged():
            return []
        now = time.monotonic()
        found = []
        for job in pending:
            if job.started is None or now - job.started < self.deadline + _GRACE_SECONDS:
                continue
            job.abandoned = True
            if job.thread in self._threads:
                self._threads.remove(job.thread)
            self._start_worker()
            found.append((job, Stuck(now - job.started, thread_stack(job.thread) if job.thread else ())))
        return found

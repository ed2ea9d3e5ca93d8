"""Execution of episodes: on worker threads, or one after another in the caller's thread.

Each episode has its own event loop. A workflow that blocks (a synchronous HTTP client, a sleep) does not delay other
episodes, and one that never returns costs only its thread.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Generic, TypeVar

from astuner.debugging.breakpoints import is_debugged
from astuner.debugging.tracebacks import Stack, thread_stack
from astuner.system.signals import signal_handlers
from astuner.task_rollout.episode_loop import Job, JobResult, run_job
from astuner.task_rollout.process_state import ProcessState
from astuner.task_rollout.uncaught import hooks

T = TypeVar("T")

# Seconds that an episode may exceed its own asyncio deadline before its thread is abandoned.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(eq=False)
class _QueuedJob(Generic[T]):
    job: Job[T]
    index: int
    state: ProcessState
    started: float | None = None
    thread: threading.Thread | None = None
    abandoned: bool = False


@dataclass(frozen=True)
class StuckJob:
    """The result of a job whose thread was abandoned.

    Attributes:
        seconds: how long the job had run.
        stack: the stack of its thread, innermost frame last; empty if the thread has ended.
    """

    seconds: float
    stack: Stack


@dataclass
class EpisodePool(Generic[T]):
    """Runs jobs, at most `workers` at a time, each on its own thread.

    Attributes:
        workers: the maximum number of concurrent jobs.
        deadline: seconds after which a job that blocks its thread is abandoned, unless a debugger is attached.
    """

    workers: int
    deadline: float
    _queue: queue.SimpleQueue[_QueuedJob[T] | None] = field(default_factory=queue.SimpleQueue)
    _results: queue.SimpleQueue[tuple[_QueuedJob[T], JobResult[T] | BaseException]] = field(
        default_factory=queue.SimpleQueue
    )
    _threads: list[threading.Thread] = field(default_factory=list)

    def run(self, jobs: Sequence[Job[T]]) -> Iterator[tuple[int, JobResult[T] | StuckJob]]:
        """Yield `(index, result)` in order of completion.

        Raises:
            DebuggerQuit: the user quit the debugger.
        """
        with hooks.installed(), contextlib.closing(ProcessState()) as state, state.alarms_ignored():
            yield from self._run(jobs, state)

    def _run(self, jobs: Sequence[Job[T]], state: ProcessState) -> Iterator[tuple[int, JobResult[T] | StuckJob]]:
        queued_jobs = [_QueuedJob(job, index, state) for index, job in enumerate(jobs)]
        for _ in range(min(self.workers, len(queued_jobs)) - len(self._threads)):
            self._start_worker()
        for each in queued_jobs:
            self._queue.put(each)
        pending = set(queued_jobs)
        del queued_jobs  # a finished job is freed
        looked_at = time.monotonic()
        while pending:
            if time.monotonic() - looked_at >= _POLL_SECONDS:  # not for each of thousands of results
                looked_at = time.monotonic()
                for queued, stuck in self._abandon_stuck(pending):
                    pending.discard(queued)
                    yield queued.index, stuck
            if results := self._wait_for_results():
                state.check()  # before this thread prints, or writes the record
            while results:
                queued, result = results.popleft()
                if queued not in pending:  # abandoned earlier, or from an interrupted run
                    continue
                pending.discard(queued)
                if isinstance(result, BaseException):
                    raise result
                yield queued.index, result

    def _wait_for_results(self) -> deque[tuple[_QueuedJob[T], JobResult[T] | BaseException]]:
        """Return the results that have arrived, or the next one; none after `_POLL_SECONDS` without any."""
        results: deque[tuple[_QueuedJob[T], JobResult[T] | BaseException]] = deque()
        with contextlib.suppress(queue.Empty):
            results.append(self._results.get(timeout=_POLL_SECONDS))
            while True:
                results.append(self._results.get_nowait())
        return results

    def close(self) -> None:
        """Drop queued jobs and end idle workers; busy workers are daemon threads, which end with the process."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        # A thread that ends during the interpreter's shutdown can crash the process in C++ code of libraries.
        join_until = time.monotonic() + _POLL_SECONDS
        for thread in self._threads:
            thread.join(max(join_until - time.monotonic(), 0.0))
        self._threads.clear()

    def _start_worker(self) -> None:
        thread = threading.Thread(target=self._work, name=f"episode-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (queued := self._queue.get()) is not None:
            queued.thread = threading.current_thread()
            queued.started = time.monotonic()
            result: JobResult[T] | BaseException
            try:
                with queued.state.watched() as mark:
                    result = run_job(queued.job)
                result = replace(result, effects=tuple(mark.effects))
            except BaseException as error:
                result = error
            self._results.put((queued, result))
            if queued.abandoned:  # another worker has replaced this one
                return

    def _abandon_stuck(self, pending: set[_QueuedJob[T]]) -> list[tuple[_QueuedJob[T], StuckJob]]:
        if is_debugged():
            return []
        now = time.monotonic()
        stuck = []
        for queued in pending:
            if queued.started is None or now - queued.started < self.deadline + _GRACE_SECONDS:
                continue
            queued.abandoned = True
            if queued.thread in self._threads:
                self._threads.remove(queued.thread)
            self._start_worker()
            stack = thread_stack(queued.thread) if queued.thread else ()
            stuck.append((queued, StuckJob(now - queued.started, stack)))
        return stuck


@dataclass(frozen=True)
class InlinePool(Generic[T]):
    """Runs jobs one after another on an event loop in the caller's thread, so that a breakpoint stops the whole run.

    Only Ctrl-C ends a job that blocks.
    """

    def run(self, jobs: Sequence[Job[T]]) -> Iterator[tuple[int, JobResult[T]]]:
        """Yield `(index, result)`, in order.

        Raises:
            KeyboardInterrupt: a signal arrived, or the user quit the debugger.
        """
        with (
            hooks.installed(),
            contextlib.closing(ProcessState(in_main_thread=True)) as state,
            state.alarms_ignored(),
        ):
            for index, job in enumerate(jobs):
                with state.watched() as mark, _signals_end_run() as received:
                    result = run_job(job, received)
                yield index, replace(result, effects=tuple(mark.effects))

    def close(self) -> None:
        """Do nothing: there are no threads to end."""


@contextlib.contextmanager
def _signals_end_run() -> Iterator[Sequence[int]]:
    """Make a signal end the run, even if it arrives inside a workflow, whose exceptions only fail the episode.

    Yields the list of the signals received so far.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with signal_handlers(_SIGNALS, interrupt):
        try:
            yield received
        except KeyboardInterrupt:
            if not received:
                raise
    if received:
        signal.raise_signal(received[0])

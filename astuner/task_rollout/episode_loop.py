"""The event loop of one episode. It continues after any exception of the episode."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import weakref
from asyncio.unix_events import _UnixSubprocessTransport  # type: ignore[attr-defined]
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from loguru import logger

from astuner.debugging.breakpoints import DebuggerQuit
from astuner.debugging.tracebacks import error_stack, innermost_user_frame
from astuner.errors import describe_error
from astuner.task_rollout.uncaught import UncaughtError, UncaughtErrors, collect_uncaught, hooks

T = TypeVar("T")
Job = Callable[[], Coroutine[object, object, T]]

# Seconds for which the tasks that an episode did not await may handle their cancellation.
_CANCEL_SECONDS = 0.1
# It starts a thread for each process, which waits for the exit. It has no state of a loop, so all loops share it.
_CHILD_WATCHER = asyncio.ThreadedChildWatcher()


@dataclass(frozen=True)
class JobResult(Generic[T]):
    """The result of a job.

    Attributes:
        value: what the job returned; None if it raised.
        uncaught: the exceptions that nothing caught, in order. The job's own exception is one of them.
    """

    value: T | None
    uncaught: tuple[UncaughtError, ...] = ()


def run_job(job: Job[T], received: Sequence[int] = ()) -> JobResult[T]:
    """Run a job on a new event loop, and then cancel the tasks that it did not await, like `asyncio.run`.

    asyncio ends its event loop when a task or callback raises `SystemExit` or `KeyboardInterrupt`. Here, the loop
    continues: the code that awaits the task receives the exception, and an exception that nothing catches is returned.

    Args:
        received: the signals that the process has received during the job. They end the run.

    Raises:
        DebuggerQuit: the user quit the debugger.
        KeyboardInterrupt: a signal arrived.
    """
    values: list[T] = []
    pid = os.getpid()

    async def main() -> None:
        # Not the result of the task: a task that requests its own cancellation ends as cancelled.
        values.append(await job())

    with hooks.installed(), collect_uncaught() as uncaught:
        try:
            loop = EpisodeLoop(uncaught, received)
            asyncio.set_event_loop(loop)
            try:
                loop.run_to_end(main())
            finally:
                loop.end()
                asyncio.set_event_loop(None)
        except BaseException as error:
            if received or isinstance(error, DebuggerQuit):
                raise
            is_internal = innermost_user_frame(error_stack(error)) is None
            uncaught.add(error, "the episode", is_internal=is_internal)
        finally:
            if os.getpid() != pid:  # a fork that returned from the episode must not continue the run
                os._exit(1)
        errors = uncaught.close()
    if uncaught.quits_debugger:
        raise DebuggerQuit
    return JobResult(values[0] if values else None, errors)


class EpisodeLoop(asyncio.SelectorEventLoop):
    """An event loop that runs one episode. It continues after `SystemExit` and `KeyboardInterrupt`."""

    def __init__(self, uncaught: UncaughtErrors, received: Sequence[int]) -> None:
        super().__init__()
        self._uncaught = uncaught
        self._received = received
        # Tasks, and calls in executors.
        self._started: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        # asyncio does not keep tasks alive: one that nothing else refers to could be garbage-collected while it waits.
        self._running: set[asyncio.Future[Any]] = set()
        self._subprocesses: weakref.WeakSet[asyncio.SubprocessTransport] = weakref.WeakSet()

        global _latest  # noqa: PLW0603 one episode runs in a process
        _latest = self

    def separate_from_parent(self) -> None:
        """Wait for no event of this process's parent.

        On Linux, a fork has its parent's epoll object, so that it would take events from the parent's loop.
        """
        self._selector = selectors.DefaultSelector()

    def run_to_end(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a coroutine to its end; raise its exception, a signal's, or one after which the loop cannot continue."""
        # Not `self.create_task`, for which the episode may have set a factory.
        task = asyncio.Task(coroutine, loop=self)
        task.add_done_callback(lambda _: asyncio.SelectorEventLoop.stop(self))
        while not task.done():
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                if self._received or isinstance(error, DebuggerQuit):
                    task.cancel()
                    task.add_done_callback(_retrieve)
                    raise
                # The awaiting code receives the exception of a task. `end` finds those that are not awaited.
                if error is not _exception(task) and not any(error is _exception(future) for future in self._started):
                    self._uncaught.add(error, "a callback")
        task.result()

    def end(self) -> None:
        """Cancel the remaining tasks, close the asynchronous generators, and close the loop."""
        try:
            self.run_to_end(self._cancel_tasks())
            for future in list(self._started):
                # The flag with which asyncio finds exceptions that were never retrieved.
                if getattr(future, "_log_traceback", False) and (error := _exception(future)) is not None:
                    self._uncaught.add(error, "a task that was not awaited")
                    _retrieve(future)
        finally:
            for task in asyncio.all_tasks(self):
                # A task that is garbage-collected while pending is reported by asyncio.
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
            try:
                super().close()
            except BaseException:  # the episode has broken the loop
                for end in (self._ssock, self._csock):  # type: ignore[attr-defined]
                    end.close()
                asyncio.BaseEventLoop.close(self)
                raise

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            logger.debug("cancelled {} tasks that an episode did not await; {} ignored it", len(tasks), len(running))
        # `shutdown_asyncgens` would hide a SystemExit of a generator.
        generators = list(self._asyncgens)  # type: ignore[attr-defined]
        if closing := [self.create_task(generator.aclose()) for generator in generators]:
            await asyncio.wait(closing, timeout=_CANCEL_SECONDS)
        # The transport of a process that the episode left would close itself on the closed loop, which fails.
        for transport in list(self._subprocesses):
            transport.close()
        await asyncio.sleep(0)  # its pipes close in the next iteration

    # What follows overrides asyncio's methods.

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future that accepts a `StopIteration`."""
        return _Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a task that runs `coro`."""
        task = super().create_task(coro, **options)
        self._started.add(task)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run `func` in a thread or process of an executor."""
        future = super().run_in_executor(executor, func, *args)
        self._started.add(future)
        return future

    async def _make_subprocess_transport(self, *args: Any, **options: Any) -> asyncio.SubprocessTransport:
        # asyncio's own method takes the child watcher of the event loop policy. The policy of uvloop has none, and Ray
        # sets that policy in the processes of actors.
        connected = self.create_future()
        transport = _UnixSubprocessTransport(self, *args, waiter=connected, **options)
        self._subprocesses.add(transport)
        _CHILD_WATCHER.add_child_handler(transport.get_pid(), self._child_watcher_callback, transport)  # type: ignore[attr-defined]
        try:
            await connected
        except BaseException as error:
            if not isinstance(error, (SystemExit, KeyboardInterrupt)):
                transport.close()
                await transport._wait()
            raise
        return transport  # type: ignore[no-any-return]

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Collect the exception from a callback or from a task that was not awaited; asyncio would only log it."""
        error = context.get("exception")
        if error is not None:
            self._uncaught.add(error, "a task that was not awaited" if context.get("future") else "a callback")
        else:
            logger.debug("event loop of an episode: {}", context.get("message"))

    def stop(self) -> NoReturn:
        """Raise RuntimeError: an episode must not stop its event loop."""
        raise RuntimeError("an episode must not stop its event loop; return from execute instead")

    def close(self) -> NoReturn:
        """Raise RuntimeError: an episode must not close its event loop."""
        raise RuntimeError("an episode must not close its event loop; astuner closes it after the episode")


_latest: EpisodeLoop | None = None


def _after_fork() -> None:
    if _latest is not None:
        _latest.separate_from_parent()


os.register_at_fork(after_in_child=_after_fork)


class _Future(asyncio.Future[Any]):
    """A future that replaces a `StopIteration` by a `RuntimeError`, as Python 3.12 does.

    In Python 3.11, a future rejects a `StopIteration`, and the code that awaits the result of an executor never
    continues. A subclass of `StopIteration` would end an `await` without an exception.
    """

    def set_exception(self, exception: type | BaseException, /) -> None:
        error = exception() if isinstance(exception, type) else exception
        if issubclass(type(error), StopIteration):
            replacement = RuntimeError(
                f"the call behind a future raised {describe_error(error)}, which a future cannot hold. It usually "
                "comes from next() of an iterator that has no more items: write next(iterator, default), or catch "
                "StopIteration inside the call"
            ).with_traceback(error.__traceback__)
            replacement.__cause__ = error
            error = replacement
        super().set_exception(error)


def _exception(future: asyncio.Future[Any]) -> BaseException | None:
    """Return the exception of a future without marking it as retrieved."""
    return getattr(future, "_exception", None)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as retrieved, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()

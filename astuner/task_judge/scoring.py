"""Asks a judge for a reward: bounded in time, checked, and with errors that lead to the judge's line."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from bdb import BdbQuit
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from astuner.deadlines import deadline, told
from astuner.errors import EpisodeError, EpisodeTimeout, JudgeError, WorkflowError
from astuner.plugin import raised_at
from astuner.schema import WorkflowOutput, WorkflowTask, checked_reward
from astuner.stacks import waiting_for
from astuner.task_judge.judge_base import BaseJudge

_Caller = Callable[..., Awaitable[object]]


async def score(
    judge: BaseJudge,
    workflow_task: WorkflowTask,
    workflow_output: WorkflowOutput,
    timeout: float | None,
    about: Callable[[], str] = str,
) -> tuple[float, bool]:
    """Have `judge` score one episode.

    A plain `compute_reward` runs in a thread of its own, an `async` one on the running loop. One that does not
    end is left behind: it blocks neither the loop nor the interpreter's exit.

    Args:
        judge: the judge.
        workflow_task: what the episode was given.
        workflow_output: what its workflow returned.
        timeout: seconds that the judge may take; None for as long as it wants.
        about: what else to say of the episode in the log when it takes longer.

    Returns:
        The reward and whether the task was solved. A judge that returns a number alone means "solved if above 0".

    Raises:
        JudgeError: the judge raised, or returned something else.
        EpisodeTimeout: it took longer than `timeout`.
    """
    asked = asyncio.ensure_future(_ask(judge, workflow_task, workflow_output, _in_daemon_thread))
    try:
        with told(timeout, lambda: _too_slow(judge, workflow_task, timeout, about()), asked):
            # Unlike `asyncio.wait_for`, this does not wait for a judge that ignores its cancellation.
            await asyncio.wait({asked}, timeout=timeout)
    finally:
        in_time = asked.done()
        asked.cancel()
    if not in_time:
        slow = _too_slow(judge, workflow_task, timeout)
        asked.add_done_callback(_forget)
        raise EpisodeTimeout(f"{slow}; mend it, or raise astuner.task_judge.timeout.")
    if asked.cancelled():
        raise _cancelled_itself(judge)
    return _checked(asked.result(), judge)


async def score_in_place(
    judge: BaseJudge,
    workflow_task: WorkflowTask,
    workflow_output: WorkflowOutput,
    timeout: float | None,
    about: Callable[[], str] = str,
) -> tuple[float, bool]:
    """Be `score`, with a plain `compute_reward` in this thread, too: a debugger stops in it as in the workflow.

    While it blocks, nothing can end it but Ctrl-C.
    """
    try:
        async with deadline(timeout, lambda: _too_slow(judge, workflow_task, timeout, about())):
            answer = await _ask(judge, workflow_task, workflow_output, _here)
    except TimeoutError as error:
        raise EpisodeTimeout(
            f"{_too_slow(judge, workflow_task, timeout)}; mend it, or raise astuner.task_judge.timeout."
        ) from error
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        raise _cancelled_itself(judge) from None
    return _checked(answer, judge)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled_itself(judge: BaseJudge) -> JudgeError:
    return JudgeError(f"judge {_name(judge)} raised CancelledError although nobody cancelled it.")


def _too_slow(judge: BaseJudge, workflow_task: WorkflowTask, timeout: float | None, about: str = "") -> str:
    said = f"judge {_name(judge)} took longer than {timeout:g} s for episode {workflow_task.episode_id}"
    return f"{said}; {about}" if about else said


def _forget(asked: asyncio.Future[object]) -> None:
    """Take note of what a judge raised after its time was up, so that asyncio does not report it as unseen."""
    if not asked.cancelled():
        asked.exception()


async def _ask(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput, call: _Caller) -> object:
    try:
        if inspect.iscoroutinefunction(judge.compute_reward):
            return await judge.compute_reward(workflow_task, workflow_output)
        answer = await call(judge.compute_reward, workflow_task, workflow_output)
        return await answer if inspect.isawaitable(answer) else answer
    except EpisodeError:
        raise
    except BdbQuit as error:  # whoever leaves the debugger means the run
        raise KeyboardInterrupt from error
    except (Exception, SystemExit) as error:
        place = raised_at(error, _folder(judge))
        raise JudgeError(f"judge {_name(judge)} raised {type(error).__name__}: {error} (at {place}).") from error


async def _here(function: Callable[..., object], *args: Any) -> object:
    """Call a plain function where, as in a thread of its own, no event loop runs, so that it may run one."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*args)
    finally:
        asyncio._set_running_loop(loop)


async def _in_daemon_thread(function: Callable[..., object], *args: Any) -> object:
    """Like `asyncio.to_thread`, whose threads would be waited for at the interpreter's exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_outcome: Callable[[Any], None], value: object) -> None:
        if not outcome.done():
            set_outcome(value)

    def run() -> None:
        try:
            settled: tuple[Callable[[Any], None], object] = outcome.set_result, context.run(function, *args)
        except BaseException as error:
            # Whatever it is, it belongs to the episode; a bare thread would only print it.
            settled = outcome.set_exception, _as_exception(error)
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(settle, *settled)

    thread = threading.Thread(target=run, name=f"judge {function!r}", daemon=True)
    thread.start()
    with waiting_for(thread):
        return await outcome


def _as_exception(error: BaseException) -> Exception:
    """`error`, or for one that would end the event loop (`SystemExit` and its like) a plain error of its name."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)


def _checked(answer: object, judge: BaseJudge) -> tuple[float, bool]:
    expected = "expected (reward, is_success): a finite number and a bool"
    reward, success = answer, None
    if isinstance(answer, tuple | list):
        if len(answer) != 2:
            raise JudgeError(f"judge {_name(judge)} returned {answer!r}; {expected}.")
        reward, success = answer
        success = success.item() if hasattr(success, "item") else success  # numpy's bool
        if not isinstance(success, bool):
            raise JudgeError(f"judge {_name(judge)} returned is_success={success!r}; {expected}.")
    try:
        number = checked_reward(reward, "the reward")
    except WorkflowError:
        raise JudgeError(f"judge {_name(judge)} returned {answer!r}; {expected}.") from None
    return number, number > 0 if success is None else success


def _name(judge: BaseJudge) -> str:
    return type(judge).__qualname__


def _folder(judge: BaseJudge) -> Path | None:
    with suppress(TypeError, OSError):  # a class made at a prompt has no file
        return Path(inspect.getfile(type(judge))).parent
    return None

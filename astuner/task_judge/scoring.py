"""Asks a judge for a reward: bounded in time, checked, and with errors that lead to the judge's line."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.errors import EpisodeError, EpisodeTimeout, JudgeError, WorkflowError
from astuner.plugin import raised_at
from astuner.schema import WorkflowOutput, WorkflowTask, checked_reward
from astuner.stacks import shown, task_stack, thread_stack
from astuner.task_judge.judge_base import BaseJudge


async def score(
    judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput, timeout: float
) -> tuple[float, bool]:
    """Have `judge` score one episode.

    A plain `compute_reward` runs in a thread of its own, an `async` one on the running loop. One that does not
    end is left behind: it blocks neither the loop nor the interpreter's exit.

    Args:
        judge: the judge.
        workflow_task: what the episode was given.
        workflow_output: what its workflow returned.
        timeout: seconds that the judge may take.

    Returns:
        The reward and whether the task was solved. A judge that returns a number alone means "solved if above 0".

    Raises:
        JudgeError: the judge raised, or returned something else.
        EpisodeTimeout: it took longer than `timeout`.
    """
    asked = asyncio.ensure_future(_ask(judge, workflow_task, workflow_output))
    slow = f"judge {_name(judge)} took longer than {timeout:g} s for episode {workflow_task.episode_id}"
    try:
        # Unlike `asyncio.wait_for`, this does not wait for a judge that ignores its cancellation.
        await asyncio.wait({asked}, timeout=timeout)
    finally:
        in_time = asked.done()
        asked.cancel()
    if not in_time:
        # The cancellation comes to it later: it still stands where it was.
        logger.debug("{}; it stood at\n{}", slow, shown(task_stack(asked, threading.current_thread())))
        asked.add_done_callback(_forget)
        raise EpisodeTimeout(f"{slow}; mend it, or raise astuner.task_judge.timeout.")
    if asked.cancelled():
        raise JudgeError(f"judge {_name(judge)} raised CancelledError although nobody cancelled it.")
    return _checked(asked.result(), judge)


def _forget(asked: asyncio.Future[object]) -> None:
    """Take note of what a judge raised after its time was up, so that asyncio does not report it as unseen."""
    if not asked.cancelled():
        asked.exception()


async def _ask(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> object:
    try:
        if inspect.iscoroutinefunction(judge.compute_reward):
            return await judge.compute_reward(workflow_task, workflow_output)
        answer = await _in_daemon_thread(judge.compute_reward, workflow_task, workflow_output)
        return await answer if inspect.isawaitable(answer) else answer
    except EpisodeError:
        raise
    except (Exception, SystemExit) as error:
        place = raised_at(error, _folder(judge))
        raise JudgeError(f"judge {_name(judge)} raised {type(error).__name__}: {error} (at {place}).") from error


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
    try:
        return await outcome
    except asyncio.CancelledError:
        logger.debug("the thread of {!r} stands at\n{}", function, shown(thread_stack(thread)))
        raise


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

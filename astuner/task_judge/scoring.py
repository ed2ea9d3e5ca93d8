"""Calls a judge with a timeout, checks the result, and reports errors with the line of the judge that raised them."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import threading
import time
from bdb import BdbQuit
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from astuner.debugging.breakpoints import DebuggerQuit
from astuner.debugging.deadlines import log_if_late
from astuner.debugging.tracebacks import traceback_of, waits_for_thread
from astuner.errors import (
    EpisodeError,
    EpisodeTimeout,
    JudgeError,
    WorkflowError,
    describe_error,
    message_of,
    short_repr,
    shorten,
)
from astuner.plugin import raised_at
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask, checked_reward
from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge

_Call = Callable[..., Awaitable[object]]
MAKE_FASTER = "make it faster, or raise astuner.task_judge.timeout."
"""The fix for a judge that is too slow, for messages."""
_EXPECTED = "expected (reward, is_success): a finite number and a bool, or a Judgement"


async def score(
    judge: BaseJudge,
    workflow_task: WorkflowTask,
    workflow_output: WorkflowOutput,
    timeout: float | None,
    details: Callable[[], str] = str,
    *,
    inline: bool = False,
) -> Judgement:
    """Score one episode with `judge`.

    A synchronous `compute_reward` runs in its own thread, an `async` one on the running event loop. If the judge does
    not return in time, it is abandoned; it blocks neither the event loop nor the exit of the interpreter.

    Args:
        timeout: time limit of the judge, in seconds; None for no limit.
        details: returns details of the episode for the log message about a late judge.
        inline: call a synchronous judge in this thread, where breakpoints work. Only Ctrl-C ends one that blocks.

    Returns:
        The checked judgement: its reward and `is_success` are set unless the episode is unscored. If the judge does
        not return whether the task was solved, it is solved if the reward is above 0.

    Raises:
        JudgeError: the judge raised, or did not return a reward.
        UnscoredError: the judge raised this error.
        EpisodeTimeout: the judge took longer than `timeout`.
    """
    call = _outside_event_loop if inline else in_daemon_thread
    ended: list[float] = []

    async def call_judge() -> Judgement:
        _call_of_this_judge.set(call)
        try:
            return await _call_judge(judge, workflow_task, workflow_output, call)
        finally:
            ended.append(time.monotonic())

    started = time.monotonic()
    scoring = asyncio.ensure_future(call_judge())
    try:
        with log_if_late(timeout, lambda: late_text(judge, workflow_task, timeout, details()), scoring):
            # Unlike `asyncio.wait_for`, this does not wait for a judge that ignores its cancellation.
            await asyncio.wait({scoring}, timeout=timeout)
    finally:
        in_time = scoring.done()
        scoring.cancel()
    # A judge that blocks the event loop ends before the loop notices the timeout.
    if not in_time or (timeout is not None and ended and ended[0] - started > timeout):
        # Retrieve a later exception, so that asyncio does not report it.
        scoring.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        raise EpisodeTimeout(f"{late_text(judge, workflow_task, timeout)}; {MAKE_FASTER}")
    if scoring.cancelled():
        raise JudgeError(f"judge {_name(judge)} raised CancelledError, but it was not cancelled.")
    if (error := scoring.exception()) is not None and issubclass(type(error), GeneratorExit):
        # Python closes the coroutines of a task that awaits a GeneratorExit, so none of them can handle it.
        raise judge_error(judge, error) from error
    return scoring.result()


async def judgement_of(judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
    """Return the checked judgement from a judge that is part of another judge, whose timeout applies.

    Raises:
        JudgeError: the judge raised, or did not return a reward.
        UnscoredError: the judge raised this error.
    """
    return await _call_judge(judge, workflow_task, workflow_output, _call_of_this_judge.get())


async def score_group(
    judge: BaseGroupJudge,
    workflow_task: WorkflowTask,
    workflow_outputs: Sequence[WorkflowOutput],
    timeout: float | None,
    *,
    inline: bool = False,
) -> list[Judgement]:
    """Score the episodes of one task together.

    Args:
        timeout: time limit of the judge, in seconds; None for no limit.
        inline: call a synchronous judge in this thread, where breakpoints work.

    Returns:
        A judgement for each episode, as from `score`.

    Raises:
        JudgeError: the judge raised, or did not return a result for each episode.
        UnscoredError: the judge raised this error.
        EpisodeTimeout: the judge took longer than `timeout`.
    """
    if len(workflow_outputs) == 1:
        return [await score(judge, workflow_task, workflow_outputs[0], timeout, inline=inline)]
    call = _outside_event_loop if inline else in_daemon_thread
    try:
        async with asyncio.timeout(timeout):
            if inspect.iscoroutinefunction(judge.compute_group_rewards):
                results: Any = await judge.compute_group_rewards(workflow_task, workflow_outputs)
            else:
                results = await call(judge.compute_group_rewards, workflow_task, workflow_outputs)
                results = await results if inspect.isawaitable(results) else results
    except TimeoutError:
        seconds = f"judge {_name(judge)} took longer than {timeout:g} s for a group of {len(workflow_outputs)} episodes"
        raise EpisodeTimeout(f"{seconds}; {MAKE_FASTER}") from None
    except EpisodeError:
        raise
    except BdbQuit as error:
        raise DebuggerQuit from error
    except Exception as error:
        raise judge_error(judge, error) from error
    if not isinstance(results, Sequence) or len(results) != len(workflow_outputs):
        raise JudgeError(
            f"judge {_name(judge)} returned {short_repr(results)} for a group of {len(workflow_outputs)} episodes; "
            "expected a list with one result per episode."
        )
    return [checked_judgement(result, judge) for result in results]


def late_text(judge: BaseJudge, workflow_task: WorkflowTask, timeout: float | None, details: str = "") -> str:
    """Return the message about a judge that took too long."""
    text = f"judge {_name(judge)} took longer than {timeout:g} s for episode {shorten(workflow_task.episode_id)}"
    return f"{text}; {details}" if details else text


async def _call_judge(
    judge: BaseJudge, workflow_task: WorkflowTask, workflow_output: WorkflowOutput, call: _Call
) -> Judgement:
    try:
        if inspect.iscoroutinefunction(judge.compute_reward):
            answer: object = await judge.compute_reward(workflow_task, workflow_output)
        else:
            answer = await call(judge.compute_reward, workflow_task, workflow_output)
            answer = await answer if inspect.isawaitable(answer) else answer
        return checked_judgement(answer, judge)
    except (EpisodeError, asyncio.CancelledError, GeneratorExit):
        raise
    except BdbQuit as error:
        raise DebuggerQuit from error
    # Whatever a judge raises fails its episode only, including SystemExit and KeyboardInterrupt.
    except BaseException as error:
        raise judge_error(judge, error) from error


def judge_error(judge: BaseJudge, error: BaseException) -> JudgeError:
    """Return an episode's error for an exception in its judge."""
    folder = None
    with suppress(TypeError, OSError):  # a class defined in an interactive session has no file
        folder = Path(inspect.getfile(type(judge))).parent
    return JudgeError(f"judge {_name(judge)} raised {describe_error(error)} (at {raised_at(error, folder)}).")


async def _outside_event_loop(function: Callable[..., object], *args: Any) -> object:
    """Call a function with no event loop set as running, as in a new thread, so that it can run its own loop."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*args)
    finally:
        asyncio._set_running_loop(loop)


async def in_daemon_thread(function: Callable[..., object], *args: Any) -> object:
    """Call a function in a daemon thread, which, unlike `asyncio.to_thread`'s, does not delay the process's exit."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(set_outcome: Callable[[Any], None], value: object) -> None:
        if not outcome.done():
            set_outcome(value)
        else:
            close_coroutine(value)

    def run() -> None:
        try:
            settled: tuple[Callable[[Any], None], object] = outcome.set_result, context.run(function, *args)
        except BaseException as error:
            # All errors belong to the episode; the thread itself would only print them.
            settled = outcome.set_exception, _as_exception(error)
        try:
            loop.call_soon_threadsafe(settle, *settled)
        except RuntimeError:  # the loop was closed in the meantime
            close_coroutine(settled[1])

    thread = threading.Thread(target=run, name=f"judge {function!r}", daemon=True)
    thread.start()
    with waits_for_thread(thread):
        return await outcome


def close_coroutine(value: object) -> None:
    """Close `value` if it is a coroutine that nobody will await, so that Python does not warn of it."""
    if inspect.iscoroutine(value):
        value.close()


_call_of_this_judge: contextvars.ContextVar[_Call] = contextvars.ContextVar(
    "_call_of_this_judge", default=in_daemon_thread
)
"""How the synchronous judges that are part of the running judge are called."""


def _as_exception(error: BaseException) -> Exception:
    """Return `error`, or a `RuntimeError` for one that would end the event loop, such as `SystemExit`."""
    # `isinstance` would read `__class__`, which a class may override.
    if issubclass(type(error), Exception) and not issubclass(type(error), StopIteration):
        return cast(Exception, error)
    stand_in = RuntimeError(describe_error(error))
    stand_in.__cause__ = error
    return stand_in.with_traceback(traceback_of(error))


def checked_judgement(answer: object, judge: BaseJudge) -> Judgement:
    """Return the judgement that a judge returned, in one of the accepted forms.

    Raises:
        JudgeError: the result has another form, or contains an invalid value.
    """
    try:
        return _complete(answer if isinstance(answer, Judgement) else _from_short_form(answer, judge))
    except (WorkflowError, TypeError, ValueError) as error:
        text = short_repr(answer) + (f": {message_of(error)}" if isinstance(answer, Judgement) else "")
        raise JudgeError(f"judge {_name(judge)} returned {text}; {_EXPECTED}.") from None


def _from_short_form(answer: object, judge: BaseJudge) -> Judgement:
    """Return the judgement for a reward, or for a reward and whether the task was solved."""
    if not isinstance(answer, tuple | list):
        return Judgement(checked_reward(answer, "the reward"))
    reward, success = answer
    success = success.item() if hasattr(success, "item") else success  # numpy's bool
    if not isinstance(success, bool):
        raise JudgeError(f"judge {_name(judge)} returned is_success={short_repr(success)}; {_EXPECTED}.")
    if isinstance(reward, Mapping) and reward:
        return Judgement(agent_rewards=reward, is_success=success)
    return Judgement(checked_reward(reward, "the reward"), success)


def _complete(judgement: Judgement) -> Judgement:
    """Return the judgement with Python's numbers, the reward of the episode, and whether the task was solved."""
    agents = _numbers(judgement.agent_rewards, "agent_rewards")
    calls = tuple(checked_reward(value, f"call_rewards[{i}]") for i, value in enumerate(judgement.call_rewards))
    if agents and calls:
        raise ValueError("expected agent_rewards or call_rewards, not both")
    reward = None if judgement.reward is None else checked_reward(judgement.reward, "the reward")
    parts = list(agents.values()) or list(calls)
    if parts:
        mean = sum(parts) / len(parts)
        if reward is not None and not math.isclose(reward, mean, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"the reward must be the mean {mean:g} of the agents' or calls' rewards, or None")
        reward = mean
    success: Any = judgement.is_success
    success = success.item() if hasattr(success, "item") else success  # numpy's bool
    if success is not None and not isinstance(success, bool):
        raise TypeError(f"is_success={short_repr(success)} is not a bool")
    return replace(
        judgement,
        reward=reward,
        is_success=None if reward is None else reward > 0 if success is None else success,
        components=_numbers(judgement.components, "components"),
        agent_rewards=agents,
        call_rewards=calls,
        explanation=str(judgement.explanation),
        unscored_cause="" if reward is not None else str(judgement.unscored_cause),
        metadata=_mapping(judgement.metadata, "metadata"),
        metrics=_numbers(judgement.metrics, "metrics"),
    )


def _numbers(values: object, name: str) -> dict[str, float]:
    numbers = _mapping(values, name)
    return {str(key): checked_reward(value, f"{name}[{short_repr(key)}]") for key, value in numbers.items()}


def _mapping(values: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a mapping, got {short_repr(values)}")
    return values


def _name(judge: BaseJudge) -> str:
    return type(judge).__qualname__

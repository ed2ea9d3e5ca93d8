"""An exception of an episode or a judge, in any task, callback, thread or finaliser, fails that episode only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.task_rollout.raising_code import (
    AWAITED,
    ERRORS,
    FORGOTTEN,
    TASKS,
    Where,
    check_failed,
    directly,
    in_call_soon,
    in_collected_generator,
    in_coroutine,
    in_finaliser,
    in_forgotten_task,
    in_task_group,
    in_thread,
    in_unclosed_generator,
    in_wait_for,
    kept,
    run,
    thrower,
)

THROWERS = {type(error).__name__: thrower(error) for error in ERRORS}


@pytest.mark.parametrize("where", AWAITED)
def test_exceptions_that_a_workflow_awaits(tokenizer: Any, where: Where):
    bodies = {name: partial(where, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, bodies).items():
        if name == "CancelledError" and where is in_task_group:
            assert episode.status == "ok"  # a group ignores a task that is cancelled
        elif name == "CancelledError":  # asyncio replaces it, without its traceback
            assert (episode.status, episode.error_kind) == ("failed", "workflow")
        else:
            check_failed(episode)


@pytest.mark.parametrize("where", FORGOTTEN)
def test_exceptions_that_nothing_awaits(tokenizer: Any, where: Where):
    bodies = {name: partial(where, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, bodies).items():
        if name == "CancelledError" and where in TASKS:
            assert episode.status == "ok"  # the task counts as cancelled
        elif name == "GeneratorExit" and where in (in_unclosed_generator, in_collected_generator):
            assert episode.status == "ok"  # the regular end of a generator
        else:
            check_failed(episode)


@pytest.mark.parametrize("where", [*AWAITED, in_forgotten_task, in_call_soon, in_thread, in_finaliser, "sync"])
def test_exceptions_of_a_judge(tokenizer: Any, inline: bool, where: Any):
    async def judges(throws: Callable[[], Any]) -> tuple[float, bool]:
        await where(throws)
        return 1.0, True

    judge_of = THROWERS
    if where != "sync":
        judge_of = {name: partial(judges, throws) for name, throws in judge_of.items()}
    for name, episode in run(tokenizer, {}, judge_of, inline=inline).items():
        if where in FORGOTTEN:
            if name == "CancelledError" and where in TASKS:
                assert episode.status == "ok"
            else:
                check_failed(episode)
        elif name == "CancelledError" and where is in_task_group:
            assert episode.status == "ok"
        elif name == "CancelledError":
            assert (episode.status, episode.error_kind) == ("failed", "judge")
        else:
            check_failed(episode, "judge")


def test_timeout_names_the_failed_callback_and_thread(tokenizer: Any):
    async def waits_for(throws: Callable[[], Any], start: Callable[[Callable[[], Any]], object]) -> None:
        start(throws)
        await asyncio.Future()

    throws = thrower(ValueError("no result"))
    bodies = {
        "callback": partial(waits_for, throws, lambda call: asyncio.get_running_loop().call_soon(call)),
        "thread": partial(waits_for, throws, lambda call: threading.Thread(target=call).start()),
    }
    for name, episode in run(tokenizer, bodies, episode_timeout=2.0).items():
        assert (episode.status, episode.error_kind) == ("failed", "timeout")
        assert "took longer than rollout.episode_timeout (2 s)" in (episode.error or "")
        assert "; ValueError: no result (at " in (episode.error or "")
        assert f"in a {name}" in (episode.error or "")


def test_async_judge_that_raises_after_an_await_fails_its_episode(tokenizer: Any, inline: bool):
    async def judges(throws: Callable[[], Any]) -> None:
        await asyncio.sleep(0.01)
        throws()

    judge_of = {name: partial(judges, throws) for name, throws in THROWERS.items()}
    for name, episode in run(tokenizer, {}, judge_of, inline=inline).items():
        assert "AsyncJudge raised " in (episode.error or "")
        if name == "CancelledError":  # asyncio replaces it, without its traceback
            assert (episode.status, episode.error_kind, episode.reward) == ("failed", "judge", None)
        else:
            check_failed(episode, "judge")


def test_async_judge_that_runs_at_its_timeout_fails_its_episode(tokenizer: Any, inline: bool):
    async def waits() -> None:
        await asyncio.sleep(600)

    async def raises_when_cancelled() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            sys.exit("late")

    async def ignores_its_cancellation() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    async def leaves_a_task_that_raises() -> None:
        kept.append(asyncio.create_task(raises_when_cancelled()))
        await asyncio.sleep(600)

    async def waits_in_an_executor() -> None:
        await asyncio.to_thread(threading.Event().wait, 600)

    cases = [waits, raises_when_cancelled, ignores_its_cancellation, leaves_a_task_that_raises, waits_in_an_executor]
    judges = {case.__name__: case for case in cases}
    for name, episode in run(tokenizer, {}, judges, judge_timeout=2.0, inline=inline).items():
        assert (episode.status, episode.error_kind, episode.reward, episode.samples) == ("failed", "timeout", None, ())
        assert len(episode.calls) == 1
        assert f"AsyncJudge took longer than 2 s for episode {episode.episode_id}" in (episode.error or "")
        assert name in episode.episode_id


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def stops_the_loop_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
    await asyncio.sleep(0.01)


async def closes_the_loop() -> None:
    asyncio.get_running_loop().close()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (stops_the_loop, "an episode must not stop its event loop"),
        (stops_the_loop_in_a_callback, "an episode must not stop its event loop"),
        (closes_the_loop, "an episode must not close its event loop"),
    ],
)
def test_an_episode_cannot_change_its_loop(tokenizer: Any, body: Any, says: str):
    episode = run(tokenizer, {"body": body})["body"]
    assert (episode.status, episode.error_kind) == ("failed", "workflow")
    assert says in (episode.error or "")


@pytest.mark.parametrize("error", [None, SystemExit(3), KeyboardInterrupt()])
def test_a_fork_that_returns_from_its_episode_does_not_continue_the_run(
    tokenizer: Any, error: BaseException | None, tmp_path: Path
):
    forks: list[int] = []

    async def returns_twice() -> None:
        if pid := os.fork():
            forks.append(pid)
            await asyncio.to_thread(time.sleep, 0.5)  # its end wakes the loop, unless the fork takes the event
        elif error is not None:
            raise error

    episode = run(tokenizer, {"returns twice": returns_twice})["returns twice"]
    (tmp_path / str(os.getpid())).touch()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    assert episode.status == "ok"
    assert not psutil.pid_exists(forks[0]) or psutil.Process(forks[0]).status() == psutil.STATUS_ZOMBIE


async def stops_behind_the_back_of_the_loop() -> None:
    asyncio.BaseEventLoop.stop(asyncio.get_running_loop())  # type: ignore[arg-type]
    await asyncio.sleep(0.01)


async def cancels_itself_and_returns() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def handles_the_exit_of_a_tool() -> None:
    with contextlib.suppress(SystemExit):
        await asyncio.wait_for(in_coroutine(thrower(SystemExit(2))), 5)
    with contextlib.suppress(KeyboardInterrupt):
        await asyncio.create_task(in_coroutine(thrower(KeyboardInterrupt())))
    assert isinstance((await asyncio.gather(in_coroutine(sys.exit), return_exceptions=True))[0], SystemExit)


@pytest.mark.parametrize(
    "body", [stops_behind_the_back_of_the_loop, cancels_itself_and_returns, handles_the_exit_of_a_tool]
)
@pytest.mark.parametrize("is_judged", [True, False])
def test_an_episode_that_handles_it_succeeds(tokenizer: Any, body: Any, is_judged: bool):
    judges = {"body": lambda: (0.5, True)} if is_judged else None
    episode = run(tokenizer, {"body": body}, judges)["body"]
    assert (episode.status, episode.error, episode.reward) == ("ok", None, 0.5 if is_judged else 1.0)


def test_broken_selector_fails_its_episode(tokenizer: Any):
    async def breaks_the_selector() -> None:
        asyncio.get_running_loop()._selector.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)

    episode = run(tokenizer, {"body": breaks_the_selector})["body"]
    assert episode.status == "failed"
    assert len(episode.calls) == 1


class Hostile(BaseException):
    """An exception of whose methods and attributes none can be used."""

    __traceback__ = None  # type: ignore[assignment]
    __cause__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]
    __notes__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]
    __class__ = property(lambda self: sys.exit(1))  # type: ignore[assignment]

    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __len__ = __bool__ = __reduce__ = __eq__ = __hash__ = __str__  # type: ignore[assignment]


def huge() -> BaseException:
    return ValueError("x" * 5_000_000)


def cyclic() -> BaseException:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    return first


def nested_group() -> BaseException:
    group: Exception = ValueError("innermost")
    for _ in range(3000):
        group = ExceptionGroup("group", [group])
    return group


def recursive_message() -> BaseException:
    class Recursive(Exception):
        def __str__(self) -> str:
            return str(self)

    return Recursive()


def text_subclass() -> BaseException:
    class Text(str):
        __slots__ = ()

        def __len__(self) -> int:
            raise SystemExit

        __getitem__ = __str__ = __format__ = __len__  # type: ignore[assignment]

    class Odd(Exception):
        def __str__(self) -> str:
            return Text("odd")

    return Odd()


@pytest.mark.parametrize("where", [directly, in_wait_for, in_forgotten_task, in_call_soon, in_thread, "judge"])
def test_exceptions_that_are_hard_to_show(tokenizer: Any, where: Any):
    makers = [Hostile, huge, cyclic, nested_group, recursive_message, text_subclass]
    throwers = {make.__name__: thrower(make()) for make in makers}
    if where == "judge":
        episodes = run(tokenizer, {}, throwers)
    else:
        episodes = run(tokenizer, {name: partial(where, throws) for name, throws in throwers.items()})
    for episode in episodes.values():
        assert (episode.status, episode.reward) == ("failed", None)
        assert 0 < len(episode.error or "") < 5000
        assert 0 < len(episode.error_traceback or "") < 30_000
        assert type(episode.error) is str


def test_reference_cycle_of_an_episode_fails_no_other(tokenizer: Any):
    """Its finaliser runs in a garbage collection, in whichever thread triggers it."""
    import gc

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            raise ValueError("late")

    async def leaves_a_cycle() -> None:
        Cyclic()

    async def collects() -> None:
        gc.collect()

    hook, reported = sys.unraisablehook, []
    sys.unraisablehook = lambda args: reported.append(str(args.exc_value))
    try:
        bodies = {"1": leaves_a_cycle, "2": collects}
        assert {episode.status for episode in run(tokenizer, bodies).values()} == {"ok"}
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert reported == ["late"]
    assert threading.Thread.start.__module__ == "threading"  # the hooks are removed after a batch


def test_threads_of_an_episode_do_not_keep_the_process_alive():
    code = """
import asyncio, concurrent.futures, threading, time
from astuner.task_rollout.episode_loop import run_job

async def episode():
    threading.Thread(target=time.sleep, args=(600,)).start()
    concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 600)
    await asyncio.wait_for(asyncio.to_thread(time.sleep, 600), 0.2)

print(run_job(episode).uncaught[0].text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("TimeoutError")

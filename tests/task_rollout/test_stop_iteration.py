"""A StopIteration that a future cannot hold fails the episode, and its message names the place."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.task_rollout.raising_code import (
    Where,
    in_executor,
    in_own_executor,
    run,
    thrower,
)


class Exhausted(StopIteration):
    pass


async def in_executor_of_processes(throws: Callable[[], Any]) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, next, iter(()))


async def in_concurrent_future(throws: Callable[[], Any]) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    threading.Timer(0.01, future.set_exception, [error_of(throws)]).start()
    await asyncio.wrap_future(future)


async def in_future_of_the_loop(throws: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_exception, error_of(throws))
    await future


async def in_future_with_a_class(throws: Callable[[], Any]) -> None:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(type(error_of(throws)))
    await future


def error_of(throws: Callable[[], Any]) -> BaseException:
    try:
        throws()
    except StopIteration as error:
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize("is_judge", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        in_executor,
        in_own_executor,
        in_executor_of_processes,
        in_concurrent_future,
        in_future_of_the_loop,
        in_future_with_a_class,
    ],
)
def test_stop_iteration_of_a_future_is_named(tokenizer: Any, is_judge: bool, where: Where):
    """A future of asyncio rejects it, so the await would last until the timeout."""
    throws = {"plain": thrower(StopIteration(3)), "subclass": thrower(Exhausted()), "next": lambda: next(iter(()))}
    bodies = {name: partial(where, throw) for name, throw in throws.items()}
    episodes = run(tokenizer, {}, bodies) if is_judge else run(tokenizer, bodies)
    for episode in episodes.values():
        assert (episode.status, episode.error_kind) == ("failed", "judge" if is_judge else "workflow")
        assert "raised StopIteration" in (episode.error or "") or "raised Exhausted" in (episode.error or "")
        assert "next(iterator, default)" in (episode.error or "")
        assert "/tests/task_rollout/" in (episode.error or "")


def test_a_workflow_can_handle_the_stop_iteration_of_a_future(tokenizer: Any):
    async def handles() -> None:
        with pytest.raises(RuntimeError) as caught:
            await asyncio.to_thread(next, iter(()))
        assert isinstance(caught.value.__cause__, StopIteration)
        assert await asyncio.to_thread(next, iter(()), "default") == "default"

    assert run(tokenizer, {"body": handles})["body"].status == "ok"

"""Tasks and errors of jobs, in worker threads and in the main thread."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from astuner.task_rollout.episode_loop import JobResult
from astuner.task_rollout.pool import EpisodePool, InlinePool

Runs = EpisodePool[int] | InlinePool[int]


@pytest.fixture(params=["worker", "main"])
def pool(request: pytest.FixtureRequest) -> Runs:
    return EpisodePool(1, 60.0) if request.param == "worker" else InlinePool()


def test_tasks_that_are_not_awaited_are_cancelled(pool: Runs, caplog: pytest.LogCaptureFixture):
    ends: list[str] = []

    async def waits_forever() -> None:
        try:
            # Nothing but the loop keeps the task and this future alive.
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ends.append("ended")
            raise

    async def episode() -> int:
        asyncio.create_task(waits_forever())  # noqa: RUF006
        await asyncio.sleep(0)
        gc.collect()
        return len(asyncio.all_tasks())

    for _, result in pool.run([episode] * 3):
        assert result.value == 2  # this task and the one that it created; the one of the previous episode is gone
    pool.close()
    assert ends == ["ended"] * 3
    assert "destroyed" not in caplog.text


def test_task_that_ignores_cancellation_does_not_block_the_next_episode(pool: Runs):
    released = threading.Event()

    async def ignores_cancellation() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def episode() -> int:
        asyncio.create_task(ignores_cancellation())  # noqa: RUF006
        await asyncio.sleep(0)
        return 1

    ended = []
    for place, _ in pool.run([episode] * 2):
        ended.append(place)
        if place == 1:
            released.set()
    pool.close()
    assert ended == [0, 1]


def test_errors_of_a_job_are_part_of_its_result(pool: Runs):
    async def episode() -> int:
        asyncio.create_task(asyncio.sleep(60))  # noqa: RUF006
        raise KeyError("episode")

    async def sound() -> int:
        return 7

    results = dict(pool.run([episode, sound]))
    pool.close()
    (error,) = results[0].uncaught
    assert results[0].value is None
    assert error.text.startswith("KeyError: 'episode' (at ")
    assert 'raise KeyError("episode")' in error.traceback
    assert results[1] == JobResult(7)

"""Tasks that an episode starts and leaves end with it, in worker threads and in the main thread."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from astuner.task_rollout.main_thread import MainThread
from astuner.task_rollout.pool import EpisodePool

Runs = EpisodePool[int] | MainThread[int]


@pytest.fixture(params=["worker", "main"])
def pool(request: pytest.FixtureRequest) -> Runs:
    return EpisodePool(1, 60.0) if request.param == "worker" else MainThread()


def test_a_task_that_is_left_is_ended_and_none_is_destroyed(pool: Runs, caplog: pytest.LogCaptureFixture):
    ends: list[str] = []

    async def waits_for_nothing() -> None:
        try:
            # Only the task itself refers to this, so that a collection would destroy both.
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ends.append("ended")
            raise

    async def episode() -> int:
        asyncio.create_task(waits_for_nothing())  # noqa: RUF006
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    for _, tasks in pool.run([episode] * 3):
        assert tasks == 2  # itself and its own: the one of the episode before is gone
        gc.collect()
    pool.close()
    assert ends == ["ended"] * 3
    assert "destroyed" not in caplog.text


def test_one_that_will_not_end_does_not_hold_up_the_next(pool: Runs):
    released = threading.Event()

    async def ignores_its_end() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def episode() -> int:
        asyncio.create_task(ignores_its_end())  # noqa: RUF006
        await asyncio.sleep(0)
        return 1

    ended = []
    for place, _ in pool.run([episode] * 2):
        ended.append(place)
        if place == 1:
            released.set()
    pool.close()
    assert ended == [0, 1]


def test_what_an_episode_raises_comes_through(pool: Runs):
    async def episode() -> int:
        asyncio.create_task(asyncio.sleep(60))  # noqa: RUF006
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(pool.run([episode]))
    pool.close()

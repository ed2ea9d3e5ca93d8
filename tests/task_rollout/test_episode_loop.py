"""Tasks and errors of jobs."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from astuner.task_rollout.episode_loop import JobResult, run_job


def test_tasks_that_are_not_awaited_are_cancelled(caplog: pytest.LogCaptureFixture):
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

    for _ in range(3):
        # This task and the one that it created; the one of the previous episode is gone.
        assert run_job(episode).value == 2
    assert ends == ["ended"] * 3
    assert "destroyed" not in caplog.text


def test_task_that_ignores_cancellation_does_not_block_the_next_episode():
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

    assert [run_job(episode).value for _ in range(2)] == [1, 1]
    released.set()


def test_errors_of_a_job_are_part_of_its_result():
    async def episode() -> int:
        asyncio.create_task(asyncio.sleep(60))  # noqa: RUF006
        raise KeyError("episode")

    async def sound() -> int:
        return 7

    result = run_job(episode)
    (error,) = result.uncaught
    assert result.value is None
    assert error.text.startswith("KeyError: 'episode' (at ")
    assert 'raise KeyError("episode")' in error.traceback
    assert run_job(sound) == JobResult(7)

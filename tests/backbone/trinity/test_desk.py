"""Which batches the explorer may begin, and what the launcher is told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from astuner.backbone.task_order import TaskOrder
from astuner.breakpoints import chosen
from astuner.config.root import AstunerConfig
from astuner.model_tuner import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest

pytestmark = pytest.mark.trinity

TASKS = [Task(f"t{number}", "?") for number in range(6)]


def desk_of(
    *,
    updates: int = 2,
    ahead: int = 1,
    hold: int = 3,
    done: int = 0,
    runners: int = 1,
    workers: int = 128,
    over: float = 0,
    style: str = "explorer_driven",
):
    from astuner.backbone.episode_worker import AgentJob
    from astuner.backbone.trinity.desk import Course, Desk, DeskJob

    config = AstunerConfig(rollout={"max_env_worker": workers}, asynchrony={"over_rollout": over, "sync_style": style})
    agent = AgentJob(config, (), Path(), "model", chosen())
    job = DeskJob(agent, tinker=True, max_model_len=64, updates=updates, runners=runners)
    request = BatchRequest((), 2, "train", 0, 0, CallSettings())
    return Desk(job), Course(TaskOrder(TASKS, 2, None), request, done, 7, ahead, ahead, hold)


async def begun(desk, step: int) -> bool:
    """Whether the batch of `step` may be begun now."""
    try:
        await asyncio.wait_for(desk.batch(step), 0.05)
    except TimeoutError:
        return False
    return True


async def test_batches_are_begun_no_further_ahead_than_the_staleness_allows():
    from astuner.backbone.trinity.news import Measured

    desk, course = desk_of(hold=100)
    assert not await begun(desk, 1)
    await desk.begin(course)
    assert await begun(desk, 1)
    assert await begun(desk, 2)
    assert not await begun(desk, 3)
    await desk.post(Measured("trainer", 1, {}))  # the first of two updates
    assert not await begun(desk, 3)
    await desk.post(Measured("trainer", 2, {}))
    assert await begun(desk, 3)
    assert not await begun(desk, 4)


async def test_the_explorer_waits_for_validations_and_after_the_last_step():
    from astuner.backbone.trinity.news import Measured

    desk, course = desk_of(ahead=100)
    await desk.begin(course)
    assert await begun(desk, 3)
    assert not await begun(desk, 4)
    await desk.go_on(3)
    assert await begun(desk, 6)
    assert not await begun(desk, 7)
    await desk.go_on(6)
    assert await begun(desk, 7)
    await desk.post(Measured("trainer", 14, {}))
    assert not await begun(desk, 8)


async def test_empty_batches_follow_the_last_where_trinity_keeps_back_as_many():
    desk, course = desk_of(ahead=2, hold=100, style="fully_async")
    await desk.begin(course)
    for step in (8, 9):
        batch = await desk.batch(step)
        assert batch.request.tasks == ()
        assert batch.least_version == (7 - 1 - 2) * 2  # of the last step's: nothing will be sampled
    assert not await begun(desk, 10)


async def test_a_resumed_run_goes_on_at_its_step():
    desk, course = desk_of(done=4, ahead=0)
    await desk.begin(course)
    assert await desk.first_step() == 5
    batch = await desk.batch(5)
    assert batch.request.step == 5
    assert list(batch.request.tasks) == TASKS[2:4]
    assert batch.least_version == 4 * 2
    assert not await begun(desk, 6)


async def test_waiting_batches_are_given_as_soon_as_they_may_be():
    from astuner.backbone.trinity.news import Measured

    desk, course = desk_of(ahead=0, hold=100)
    await desk.begin(course)
    waiting = asyncio.create_task(desk.batch(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await desk.post(Measured("trainer", 2, {}))
    batch = await waiting
    assert batch.request.step == 2
    assert batch.least_version == 2


@pytest.mark.parametrize(("runners", "workers", "share"), [(1, 128, 2), (2, 128, 1), (1, 2, 1), (1, 1, 1)])
async def test_a_share_is_what_a_runner_can_run_at_the_same_time(runners: int, workers: int, share: int):
    desk, course = desk_of(runners=runners, workers=workers)
    await desk.begin(course)
    assert (await desk.batch(1)).share == share


async def test_news_come_in_order_and_usable_episodes_in_that_of_the_batch():
    from astuner.backbone.trinity.news import Done, Ended

    desk, course = desk_of()
    await desk.begin(course)
    ended = [
        Ended("train", 1, Episode(f"e{task.task_id}{repeat}", task, repeat, "ok", 1.0, True))
        for task in reversed(TASKS[:2])
        for repeat in (1, 0)
    ]
    failed = Ended("train", 1, Episode("failed", TASKS[0], 2, "failed", None, None))
    for news in (*ended, failed, Done("train", 1, 2, ())):
        await desk.post(news)
    assert await desk.read(5.0) == [*ended, failed, Done("train", 1, 2, ())]
    assert await desk.read(0.01) == ()
    assert [one.episode_id for one in await desk.take_usable(1)] == ["et00", "et01", "et10", "et11"]
    assert await desk.take_usable(1) == []


async def test_each_task_can_be_given_up_by_itself_for_over_rollout():
    desk, course = desk_of(over=0.5)
    await desk.begin(course)
    assert (await desk.batch(1)).share == 1
    desk, course = desk_of()
    await desk.begin(course)
    assert (await desk.batch(1)).share == 2

"""When batches may start, and which events the launcher receives."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from astuner.backbone.training.schedule import TaskOrder, TaskSampler
from astuner.config.root import AstunerConfig
from astuner.config.task_selection import CurriculumConfig
from astuner.debugging.breakpoints import active_breakpoints
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Episode, Task
from astuner.task_rollout.rollout import BatchRequest

pytestmark = pytest.mark.trinity

TASKS = [Task(f"t{number}", "?") for number in range(6)]


def make_coordinator(
    *,
    updates: int = 2,
    max_steps_ahead: int = 1,
    pause_every: int = 3,
    done: int = 0,
    runners: int = 1,
    workers: int = 128,
    over_rollout: float = 0,
    style: str = "explorer_driven",
):
    from astuner.backbone.episode_workers.messages import AgentJob
    from astuner.backbone.trinity.coordinator import Coordinator, CoordinatorJob, StepSchedule

    config = AstunerConfig(
        rollout={"max_env_worker": workers}, asynchrony={"over_rollout": over_rollout, "sync_style": style}
    )
    agent = AgentJob(config, (), Path(), "model", active_breakpoints())
    job = CoordinatorJob(agent, uses_tinker=True, max_model_len=64, updates=updates, runners=runners)
    request = BatchRequest((), 2, "train", 0, 0, CallSettings())
    return Coordinator(job), StepSchedule(
        TaskOrder(TASKS, 2, None), request, done, 7, max_steps_ahead, max_steps_ahead, pause_every
    )


async def can_start(coordinator, step: int) -> bool:
    """Return whether the batch of `step` may start now."""
    try:
        await asyncio.wait_for(coordinator.training_batch(step), 0.05)
    except TimeoutError:
        return False
    return True


async def test_explorer_is_at_most_max_steps_ahead():
    from astuner.backbone.trinity.coordinator import MetricsLogged

    coordinator, schedule = make_coordinator(pause_every=100)
    assert not await can_start(coordinator, 1)
    await coordinator.start_training(schedule)
    assert await can_start(coordinator, 1)
    assert await can_start(coordinator, 2)
    assert not await can_start(coordinator, 3)
    await coordinator.post_event(MetricsLogged("trainer", 1, {}))  # the first of two updates
    assert not await can_start(coordinator, 3)
    await coordinator.post_event(MetricsLogged("trainer", 2, {}))
    assert await can_start(coordinator, 3)
    assert not await can_start(coordinator, 4)


async def test_explorer_pauses_for_validations_and_stops_after_the_last_step():
    from astuner.backbone.trinity.coordinator import MetricsLogged

    coordinator, schedule = make_coordinator(max_steps_ahead=100)
    await coordinator.start_training(schedule)
    assert await can_start(coordinator, 3)
    assert not await can_start(coordinator, 4)
    await coordinator.resume_after(3)
    assert await can_start(coordinator, 6)
    assert not await can_start(coordinator, 7)
    await coordinator.resume_after(6)
    assert await can_start(coordinator, 7)
    await coordinator.post_event(MetricsLogged("trainer", 14, {}))
    assert not await can_start(coordinator, 8)


async def test_empty_batches_follow_the_last_step_in_fully_async():
    coordinator, schedule = make_coordinator(max_steps_ahead=2, pause_every=100, style="fully_async")
    await coordinator.start_training(schedule)
    for step in (8, 9):
        batch = await coordinator.training_batch(step)
        assert batch.request.tasks == ()
        assert batch.min_version == (7 - 1 - 2) * 2  # that of the last step: nothing is sampled
    assert not await can_start(coordinator, 10)


async def test_resumed_run_continues_at_its_step():
    coordinator, schedule = make_coordinator(done=4, max_steps_ahead=0)
    await coordinator.start_training(schedule)
    assert await coordinator.first_step() == 5
    batch = await coordinator.training_batch(5)
    assert batch.request.step == 5
    assert list(batch.request.tasks) == TASKS[2:4]
    assert batch.min_version == 4 * 2
    assert not await can_start(coordinator, 6)


@pytest.mark.parametrize("steps_ahead", [0, 1])
async def test_batches_that_depend_on_results_wait_for_them(steps_ahead: int):
    from astuner.backbone.trinity.coordinator import MetricsLogged

    def sampler() -> TaskSampler:
        settings = {"batch_size": 2, "seed": 1, "shuffle": True, "steps_ahead": steps_ahead}
        return TaskSampler(TASKS, weights={}, curriculum=CurriculumConfig(enable=True), **settings)

    coordinator, schedule = make_coordinator(updates=1, max_steps_ahead=steps_ahead, pause_every=100)
    launcher = sampler()
    await coordinator.start_training(replace(schedule, order=TaskOrder(TASKS, 2, None, sampler())))
    for step in range(1, 7):
        next_step = step + 1 + steps_ahead
        batch = await coordinator.training_batch(step)
        assert list(batch.request.tasks) == launcher.batch(step)
        assert not await can_start(coordinator, next_step)
        await coordinator.post_event(MetricsLogged("trainer", step, {}))
        assert not await can_start(coordinator, next_step), "the trainer is done, and the results are not known"
        rates = {task.task_id: step % 3 / 2 for task in launcher.batch(step)}
        launcher.record(step, rates)
        waiting = asyncio.create_task(coordinator.training_batch(next_step))
        await asyncio.sleep(0)
        await coordinator.record_success(step, rates)
        if next_step <= 7:
            assert (await waiting).request.step == next_step
        waiting.cancel()
    episodes = await coordinator.pop_usable_episodes(6)
    assert episodes == []


async def test_waiting_batch_is_returned_when_it_may_start():
    from astuner.backbone.trinity.coordinator import MetricsLogged

    coordinator, schedule = make_coordinator(max_steps_ahead=0, pause_every=100)
    await coordinator.start_training(schedule)
    waiting = asyncio.create_task(coordinator.training_batch(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await coordinator.post_event(MetricsLogged("trainer", 2, {}))
    batch = await waiting
    assert batch.request.step == 2
    assert batch.min_version == 2


@pytest.mark.parametrize("engines", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [8, 12, 128, 1024])
async def test_every_engine_is_busy_with_at_most_max_env_worker_episodes(workers: int, engines: int):
    from astuner.backbone.trinity.explorer_plugins import _trinity_tasks

    per_engine = workers // engines
    coordinator, schedule = make_coordinator(runners=engines, workers=per_engine)
    for batch, repeats in product((1, 2, 5, 32, 128), (1, 4, 8, 64)):
        tasks = tuple(Task(f"t{number}", "?") for number in range(batch))
        request = replace(schedule.request, tasks=tasks, repeats=repeats)
        await coordinator.request_evaluation(request)
        shares = _trinity_tasks(await coordinator.evaluation_batch(), is_eval=True)
        parts = [share.raw_task["request"] for share in shares]
        assert [episode for part in parts for episode in part.episodes()] == request.episodes()
        assert [share.index["place"] for share in shares] == [tasks.index(part.tasks[0]) for part in parts]
        for part in parts:
            of_episodes = dict.fromkeys(task.task_id for task, _ in part.episodes())
            assert [task.task_id for task in part.tasks] == list(of_episodes)
        sizes = [len(part.episodes()) for part in parts]
        assert len(parts) >= min(engines, batch * repeats)
        unit = repeats if batch >= engines else 1  # tasks are divided only if there are fewer than engines
        assert max(sizes) - min(sizes) <= unit
        assert all(size % unit == 0 for size in sizes)
        assert len(parts) == batch * repeats // unit or len(parts) % engines == 0  # no engine waits in the last round
        # The episodes of a single task may be more: they wait for each other in the runner.
        assert max(sizes) <= max(per_engine, unit)


@pytest.mark.parametrize("engines", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [8, 12, 128, 1024])
async def test_over_rollout_runs_whole_tasks_with_at_most_max_env_worker_episodes(workers: int, engines: int):
    from astuner.backbone.trinity.explorer_plugins import _trinity_tasks
    from astuner.backbone.trinity.rules import runners_per_engine

    for batch, repeats in product((1, 2, 5, 32, 128), (1, 4, 8, 64)):
        config = AstunerConfig(
            data={"train_batch_size": batch},
            rollout={"num_repeat": repeats, "max_env_worker": workers},
            asynchrony={"over_rollout": 0.25},
        )
        runners = engines * runners_per_engine(config, engines)
        per_runner = max(1, workers // runners)
        coordinator, schedule = make_coordinator(runners=runners, workers=per_runner, over_rollout=0.25)
        tasks = tuple(Task(f"t{number}", "?") for number in range(batch))
        await coordinator.request_evaluation(replace(schedule.request, tasks=tasks, repeats=repeats))
        shares = _trinity_tasks(await coordinator.evaluation_batch(), is_eval=True)
        assert [list(share.raw_task["request"].tasks) for share in shares] == [[task] for task in tasks]
        # Each engine has a runner, and Trinity gives the idle ones a task each.
        assert runners >= engines
        assert runners * min(repeats, per_runner) <= workers


async def test_no_update_and_no_batch_starts_after_the_end_and_a_started_update_is_finished():
    from astuner.backbone.trinity.coordinator import BatchConsumed, MetricsLogged

    coordinator, schedule = make_coordinator(done=2, pause_every=100)  # two optimizer steps per training step
    await coordinator.start_training(schedule)
    ended = asyncio.create_task(coordinator.wait_until_ended())
    assert await coordinator.start_update(BatchConsumed(5, {}))
    assert not ended.done()
    assert await coordinator.end_training(2) == 3
    await asyncio.wait_for(ended, 5.0)
    assert await coordinator.start_update(BatchConsumed(6, {}))
    await coordinator.post_event(MetricsLogged("trainer", 6, {}))
    assert not await coordinator.start_update(BatchConsumed(7, {}))
    assert not await can_start(coordinator, 4)
    assert [event.trainer_step for event in await coordinator.read_events(5.0) if isinstance(event, BatchConsumed)] == [
        5,
        6,
    ]
    assert await coordinator.end_training(3) == 3


async def test_training_that_ends_before_its_first_update_ends_after_the_step_of_its_checkpoint():
    from astuner.backbone.trinity.coordinator import BatchConsumed

    coordinator, schedule = make_coordinator(done=2)
    await coordinator.start_training(schedule)
    assert await coordinator.end_training(2) == 2
    assert not await coordinator.start_update(BatchConsumed(5, {}))


async def test_a_step_whose_episodes_are_complete_is_trained_after_the_end():
    from astuner.backbone.trinity.coordinator import BatchConsumed

    coordinator, schedule = make_coordinator(done=2)
    await coordinator.start_training(schedule)
    assert await coordinator.end_training(3) == 3
    assert [await coordinator.start_update(BatchConsumed(step, {})) for step in (5, 6, 7)] == [True, True, False]


async def test_events_are_in_order_and_usable_episodes_in_batch_order():
    from astuner.backbone.trinity.coordinator import EpisodeFinished, ShareFinished

    coordinator, schedule = make_coordinator()
    await coordinator.start_training(schedule)
    finished = [
        EpisodeFinished("train", 1, Episode(f"e{task.task_id}{repeat}", task, repeat, "ok", 1.0, True))
        for task in reversed(TASKS[:2])
        for repeat in (1, 0)
    ]
    failed = EpisodeFinished("train", 1, Episode("failed", TASKS[0], 2, "failed", None, None))
    for event in (*finished, failed, ShareFinished("train", 1, 2, ())):
        await coordinator.post_event(event)
    assert await coordinator.read_events(5.0) == [*finished, failed, ShareFinished("train", 1, 2, ())]
    assert await coordinator.read_events(0.01) == ()
    assert [episode.episode_id for episode in await coordinator.pop_usable_episodes(1)] == [
        "et00",
        "et01",
        "et10",
        "et11",
    ]
    assert await coordinator.pop_usable_episodes(1) == []


async def test_over_rollout_uses_one_task_per_share():
    coordinator, schedule = make_coordinator(over_rollout=0.5)
    await coordinator.start_training(schedule)
    assert (await coordinator.training_batch(1)).shares == 2
    coordinator, schedule = make_coordinator()
    await coordinator.start_training(schedule)
    assert (await coordinator.training_batch(1)).shares == 1

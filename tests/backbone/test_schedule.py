"""Which tasks a step takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.training.schedule import TaskOrder, learning_rate
from astuner.config.trainer import OptimConfig
from astuner.schema import Task


def tasks(count: int) -> list[Task]:
    return [Task(str(i), "") for i in range(count)]


@given(st.integers(1, 30), st.integers(1, 10), st.none() | st.integers(0, 5))
def test_every_epoch_takes_every_task_once(count: int, batch: int, seed: int | None):
    order = TaskOrder(tasks(count), batch, seed)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch + 1, (epoch + 1) * order.steps_per_epoch + 1)
        drawn = [task.task_id for step in steps for task in order.batch(step)]
        assert sorted(drawn, key=int) == [str(i) for i in range(count)]
    assert order.total_steps(2, None) == 2 * order.steps_per_epoch
    assert order.total_steps(2, 1) == 1


def test_order_depends_on_seed_and_epoch_only():
    first, again, other = (TaskOrder(tasks(20), 20, seed) for seed in (1, 1, 2))
    assert first.batch(1) == again.batch(1)
    assert first.batch(1) != first.batch(2)
    assert first.batch(1) != other.batch(1)
    assert TaskOrder(tasks(20), 20, None).batch(2) == tasks(20)


def rates(schedule: str, steps: int, warmup: int = 0, ratio: float = 0.1) -> list[float]:
    config = OptimConfig(lr=1.0, lr_scheduler=schedule, lr_warmup_steps=warmup, min_lr_ratio=ratio)
    return [learning_rate(config, steps, step) for step in range(1, steps + 1)]


def test_schedules_end_at_the_minimum_at_the_last_step():
    assert rates("linear", 5) == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1])
    assert rates("cosine", 3) == pytest.approx([1.0, 0.55, 0.1])
    assert rates("cosine", 5, warmup=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.55, 0.1])
    assert rates("constant", 3, warmup=1) == pytest.approx([0.5, 1.0, 1.0])


@given(st.sampled_from(["linear", "cosine"]), st.integers(0, 4), st.integers(2, 20), st.floats(0, 1))
def test_a_schedule_falls_from_the_full_rate_to_the_minimum(schedule: str, warmup: int, rest: int, ratio: float):
    after = rates(schedule, warmup + rest, warmup, ratio)[warmup:]
    assert after[0] == pytest.approx(1.0)
    assert after[-1] == pytest.approx(ratio, abs=1e-12)
    assert after == sorted(after, reverse=True)


def test_a_run_of_one_step_has_the_full_rate():
    assert rates("cosine", 1, ratio=0.0) == [1.0]

"""Which tasks a step takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astuner.backbone.training.schedule import TaskOrder
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

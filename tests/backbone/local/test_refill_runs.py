"""Whole runs with `dynamic_sampling: refill`: further tasks take the place of groups with equal rewards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import AstunerJob
from astuner.run_record import read_index, read_metrics

MakeJob = Callable[..., AstunerJob]
REFILL = {"trainer_common__algorithm__dynamic_sampling": "refill", "trainer_common__val_pass_n": 1}
METRICS = ("refill/batches", "refill/tasks", "refill/missing_groups", "episodes/total")


def tasks_of(record: Path) -> list[list[tuple[str, bool]]]:
    """The tasks of each training step in order, and whether their rewards differ."""
    steps: dict[int, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for entry in read_index(record):
        if entry.split == "train":
            steps[entry.step][entry.task_id].append(entry.reward)
    return [[(task, len(set(rewards)) > 1) for task, rewards in steps[step].items()] for step in sorted(steps)]


def refills_of(record: Path) -> list[list[float | None]]:
    rows = [row.metrics for row in read_metrics(record) if "refill/tasks" in row.metrics]
    return [[row[name] for name in METRICS] for row in rows]


def test_a_step_runs_further_tasks_until_its_batch_is_full(make_job: MakeJob, tmp_path: Path) -> None:
    whole = make_job("SomeEqual", trainer_common__total_training_steps=6, **REFILL).tune(tmp_path / "whole").record
    steps = tasks_of(whole)
    # Two of six tasks have equal rewards.
    assert [sum(differs for _, differs in tasks) for tasks in steps] == [2] * 6
    assert [row[1:] for row in refills_of(whole)] == [[len(tasks) - 2, 0.0, 4.0 * len(tasks)] for tasks in steps]
    counts = Counter(task for tasks in steps for task, _ in tasks)
    assert sum(counts.values()) > 12
    assert (len(counts), max(counts.values()) - min(counts.values()) <= 1) == (6, True)

    # The run is resumed after three steps.
    for steps_done in (3, 6):
        job = make_job("SomeEqual", trainer_common__total_training_steps=steps_done, **REFILL)
        resumed = job.tune(tmp_path / "resumed").record
    assert tasks_of(resumed) == steps
    assert refills_of(resumed) == refills_of(whole)


@pytest.mark.parametrize(("max_refills", "expected"), [(1, [1.0, 2.0, 2.0, 16.0]), (5, [2.0, 4.0, 2.0, 24.0])])
def test_refills_are_bounded(make_job: MakeJob, tmp_path: Path, max_refills: int, expected: list[float]) -> None:
    job = make_job(
        "Letters",
        rollout__temperature=0.0,
        trainer_common__total_training_steps=1,
        trainer_common__algorithm__max_refills=max_refills,
        **REFILL,
    )
    record = job.tune(tmp_path / "records").record
    assert refills_of(record) == [expected]
    assert "0 of 2 groups have a learning signal" in (record / "run.log").read_text()

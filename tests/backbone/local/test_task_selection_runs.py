"""Whole runs with a mixture, filters and a curriculum: what is trained, recorded, and resumed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.run_record import read_index, read_metrics, read_summary
from campaigns.serial_run import Runs, compare, write_job

MakeJob = Callable[..., AstunerJob]


def batches_of(record: Path) -> list[list[str]]:
    """The tasks of each training step, in order."""
    steps: dict[int, dict[str, None]] = defaultdict(dict)
    for entry in read_index(record):
        if entry.split == "train":
            steps[entry.step][entry.task_id] = None
    return [list(steps[step]) for step in sorted(steps)]


@pytest.fixture(scope="module")
def selecting(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path]:
    """Runs of 6 steps with a mixture, a curriculum and a difficulty filter, and the record of an uninterrupted one."""
    folder = tmp_path_factory.mktemp("selecting")
    (folder / "more.jsonl").write_text("".join(json.dumps({"question": f"more {n}"}) + "\n" for n in range(5)))
    parts = [
        {"type": "random_dummy", "weight": 2, "random_dummy": {"training_tasks": 7, "validation_tasks": 2}},
        {"type": "dataset_file", "dataset_file": {"training": {"file_path": "more.jsonl"}}},
    ]
    settings = {
        "task_reader__mixture": parts,
        "task_reader__filters": [{"type": "difficulty", "window": 1, "min": 0.0, "max": 1.0}],
        "task_reader__curriculum__enable": True,
        "trainer_common__total_training_steps": 6,
        "data__train_batch_size": 3,
        "trainer_common__test_freq": 100,
    }
    path = write_job(folder, model_folder, **settings)
    path.write_text(path.read_text().replace("    type: dataset_file\n", "    type: mixture\n", 1))
    runs = Runs(path)
    runs.complete(folder / "whole")
    return runs, folder / "whole/run"


def test_a_run_takes_tasks_of_all_readers_by_weight(selecting: tuple[Runs, Path]) -> None:
    _, whole = selecting
    batches = batches_of(whole)
    assert len(batches) == 6
    assert all(len(batch) <= 3 for batch in batches)
    sources = [task.partition("/")[0] for task in batches[0]]
    assert sorted(sources) == ["dataset_file", "random_dummy", "random_dummy"]
    rows = [row.metrics for row in read_metrics(whole) if "tasks/too_easy" in row.metrics]
    assert len(rows) == 6
    assert all(0.0 <= row[f"success/rate/{source}"] <= 1.0 for row in rows for source in sources)
    (*_, validation) = [row.metrics for row in read_metrics(whole) if "val/success_rate" in row.metrics]
    by_source = {name: rate for name, rate in validation.items() if name.startswith("val/success_rate/")}
    assert by_source == {"val/success_rate/random_dummy": validation["val/success_rate"]}
    left_out = {"too easy": rows[-1]["tasks/too_easy"], "too hard": rows[-1]["tasks/too_hard"]}
    assert read_summary(whole).tasks_left_out == {cause: count for cause, count in left_out.items() if count}


@pytest.mark.parametrize("checkpoint", ["step_000002", "step_000004"])
def test_a_killed_run_takes_the_same_tasks(selecting: tuple[Runs, Path], tmp_path: Path, checkpoint: str) -> None:
    runs, whole = selecting
    moment = tmp_path / "run/checkpoints" / checkpoint
    assert runs.kill_at(tmp_path, moment.exists)
    runs.complete(tmp_path)
    assert batches_of(tmp_path / "run") == batches_of(whole)
    comparison = compare(whole, tmp_path / "run")
    assert comparison.is_equal, comparison
    assert read_summary(tmp_path / "run").tasks_left_out == read_summary(whole).tasks_left_out


def test_filters_are_counted_in_log_and_summary(make_job: MakeJob, tmp_path: Path) -> None:
    filters: list[dict[str, Any]] = [
        {"type": "regex", "field": "unlucky", "pattern": "True", "action": "drop"},
        {"type": "length", "unit": "tokens", "max": 10_000},
        {"type": "deduplicate"},
    ]
    job = make_job(task_reader__filters=filters, trainer_common__total_training_steps=2)
    tuned = job.tune(tmp_path / "records")
    assert [len(batch) for batch in batches_of(tuned.record)] == [2, 2]
    assert read_summary(tuned.record).tasks_left_out == {"unlucky matches 'True'": 2}
    assert "filters left out 2 tasks (2 unlucky matches 'True')" in (tuned.record / "run.log").read_text()


def test_supervised_training_mixes_readers(make_job: MakeJob, tmp_path: Path) -> None:
    parts = [{"type": "random_dummy", "name": name, "random_dummy": {"training_tasks": 4}} for name in ("a", "b")]
    job = make_job(algorithm="sft", task_reader__mixture=parts)
    job.configure({"task_reader.type": "mixture"})
    tuned = job.tune(tmp_path / "records")
    assert [row.metrics["loss/sft"] > 0 for row in read_metrics(tuned.record) if "loss/sft" in row.metrics] == [
        True
    ] * 3

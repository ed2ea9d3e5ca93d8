"""A run whose tasks depend on earlier results, and what its record must contain."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from astuner import AstunerJob
from astuner.backbone.training.schedule import TaskOrder
from astuner.config.root import AstunerConfig
from astuner.run_record import read_index
from astuner.task_reader import read_tasks
from tests.backbone.runs import Run

SELECTING: dict[str, Any] = {
    "task_reader__mixture": [
        {"type": "random_dummy", "weight": 2, "random_dummy": {"training_tasks": 5, "validation_tasks": 1}},
        {"type": "random_dummy", "name": "other", "random_dummy": {"training_tasks": 4, "seed": 1}},
    ],
    "task_reader__filters": [{"type": "difficulty", "window": 1}],
    "task_reader__curriculum__enable": True,
}


def check_batches(record: Path, config: AstunerConfig, steps: int, steps_ahead: int = 0) -> None:
    """Check that each step took the tasks that follow from the recorded results of the steps before it."""
    tasks = read_tasks(config.task_reader, base_dir=record, search=())
    order = TaskOrder.from_config(config, tasks, steps_ahead)
    assert order.sampler is not None
    entries = [entry for entry in read_index(record) if entry.split == "train"]
    for step in range(1, steps + 1):
        outcomes: dict[str, list[float]] = {}
        for entry in entries:
            if entry.step == step:
                outcomes.setdefault(entry.task_id, [])
                if entry.reward is not None:
                    outcomes[entry.task_id].append(float(bool(entry.is_success)))
        assert sorted(outcomes) == sorted(task.task_id for task in order.batch(step)), f"step {step}"
        order.sampler.record(step, {task: sum(rates) / len(rates) for task, rates in outcomes.items() if rates})


def check_kill_and_resume(job: AstunerJob, folder: Path, steps: int, steps_ahead: int = 0) -> None:
    """Kill a run with the settings `SELECTING` in its third step, resume it, and check the tasks of all its steps."""
    job.configure({"task_reader.type": "mixture", "trainer_common.total_training_steps": steps})
    first = Run(job, folder)
    first.wait_for(step=2)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert first.leftovers() == []
    second = Run(job, folder)
    code, printed = second.ended()
    assert code == 0, printed
    assert second.leftovers() == []
    assert "resuming from the checkpoint of step" in second.log.read_text()
    check_batches(second.record, job.config.astuner, steps, steps_ahead)

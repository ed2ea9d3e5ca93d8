"""Whole runs whose agent is a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.cli.main import astuner
from astuner.context_tracker.audit import certificate
from astuner.run_record import read_episode, read_index
from tests.workflows.command.programs import write_program


def command_job(model: Path, folder: Path, backbone: str, **settings: Any) -> AstunerJob:
    """Return a job of one step with two tasks and two episodes each, whose agent calls the model twice."""
    folder.mkdir()
    write_program(
        folder, "print(len(call(json.loads(os.environ['TASK_JSON'])['main_query']))); print(float(call('b') > 'm'))"
    )
    rows = [{"question": f"question {index}", "answer": ""} for index in range(2)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "experiment_name": "run",
        "backbone": backbone,
        "model__renderer": "qwen3",
        "data__train_batch_size": 2,
        "rollout__num_repeat": 2,
        "rollout__max_env_worker": 2,
        "rollout__max_response_length_in_one_turn": 6,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "trainer_common__total_training_steps": 1,
        "trainer_common__val_before_train": False,
        "trainer_common__device": "cpu",
        "workflow__command": ["python", str(folder / "agent.py")],
        "workflow__agents": {"asker": "question"},
    }
    job = AstunerJob(algorithm="grpo", model=model, **(values | settings))
    return job.set_data("file", folder / "train.jsonl")


@pytest.mark.parametrize(
    ("backbone", "parallel"),
    [
        ("debug", 1),
        ("debug", 4),
        ("local", 4),
        # Warnings of Ray, verl and Trinity vary between their versions.
        pytest.param("verl", 4, marks=[pytest.mark.verl, pytest.mark.filterwarnings("ignore")]),
        pytest.param("trinity", 4, marks=[pytest.mark.trinity, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_a_command_runs_on_every_backbone(model_folder: Path, tmp_path: Path, backbone: str, parallel: int) -> None:
    conf = tmp_path / "run.yaml"
    command_job(model_folder, tmp_path / "project", backbone, debug__debug_max_parallel=parallel).dump_job_as_yaml(conf)
    astuner.main(["--conf", str(conf), "--exp-dir", str(tmp_path / "records")], standalone_mode=False)
    record = tmp_path / "records" / ("run-debug" if backbone == "debug" else "run")
    episodes = [read_episode(record / entry.path) for entry in read_index(record)]
    assert len(episodes) == 4
    for episode in episodes:
        assert (episode.status, episode.error) == ("ok", None)
        assert sorted({call.agent_name for call in episode.calls}) == ["agent", "asker"]
        assert certificate(episode.calls, episode.samples) == 1.0
        assert episode.metadata["exit_code"] == 0
        assert episode.reward == float(episode.metadata["stdout"].splitlines()[-1])

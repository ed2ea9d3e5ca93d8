"""A run whose environment service is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astuner import AstunerJob
from tests.env_service import killing_environment

SETTINGS: dict[str, Any] = {
    "task_reader__type": "env_service",
    "task_reader__env_service__env_type": f"{Path(killing_environment.__file__)}->KillsItsService",
    "task_reader__env_service__env_url": "auto",
    "task_reader__env_service__env_action_preference": "text",
    "task_reader__env_service__validation_split": None,
    "data__train_batch_size": 2,
    "rollout__use_agentscope_protocol": False,
    "rollout__num_repeat": 2,
    "rollout__max_env_worker": 2,
    "rollout__max_response_length_in_one_turn": 4,
    "rollout__max_model_len": 512,
    "rollout__compute_madness_checklist": [],
    "rollout__multi_turn__max_steps": 2,
    "trainer_common__total_training_steps": 3,
    "trainer_common__val_before_train": False,
}


def test_a_run_restarts_its_service_and_continues(model_folder: Path, tmp_path: Path, log: list[str]) -> None:
    job = AstunerJob(algorithm="grpo", model=model_folder, backbone="local", model__renderer="qwen3", **SETTINGS)
    job.configure({"task_reader.env_service.env_params": {"folder": str(tmp_path)}})
    tuned = job.tune(tmp_path / "record")
    assert (tmp_path / "killed").exists()
    assert sum("service env_service ended with exit code 137 during the run; restart 1" in line for line in log) == 1
    assert tuned.metrics.episodes.ok + tuned.metrics.episodes.failed == 12
    assert 1 <= tuned.metrics.episodes.failed <= 4  # those that were running

"""A small job for tests of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob

AGENTS = Path(__file__).parent / "agents.py"


@pytest.fixture
def make_job(model_folder: Path, tmp_path: Path) -> Callable[..., AstunerJob]:
    """Return a function that makes a job of 3 steps of 2 tasks × 4 episodes on a random model."""

    def make(workflow: str = "Letters", **settings: Any) -> AstunerJob:
        rows = [{"question": f"question {i}", "answer": "", "unlucky": i % 3 == 0} for i in range(6)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "val.jsonl").write_text("".join(json.dumps(row | {"question": "?"}) + "\n" for row in rows[:2]))
        values: dict[str, Any] = {
            "experiment_name": "run",
            "model__renderer": "qwen3",
            "data__train_batch_size": 2,
            "rollout__num_repeat": 4,
            "rollout__max_env_worker": 2,
            "rollout__temperature": 1.0,
            "rollout__max_response_length_in_one_turn": 6,
            "rollout__max_model_len": 256,
            "rollout__compute_madness_checklist": [],
            "trainer_common__total_training_steps": 3,
            "trainer_common__save_freq": 1,
            "trainer_common__use_kl_loss": False,
            "trainer_common__optim__lr": 1e-2,
            "trainer_common__val_pass_n": 2,
            "rollout__val_kwargs__temperature": 1.0,
            "rollout__val_kwargs__do_sample": True,
        }
        job = AstunerJob(algorithm=settings.pop("algorithm", "grpo"), model=model_folder, **(values | settings))
        job.set_workflow(f"{AGENTS}->{workflow}")
        return job.set_data("file", tmp_path / "train.jsonl", validation_path=tmp_path / "val.jsonl")

    return make

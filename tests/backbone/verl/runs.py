"""Whole runs of the verl backbone on a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astuner import AstunerJob

AGENTS = Path(__file__).parent / "faulty_agents.py"


def make_job(workflow: str, model: Path, folder: Path, **settings: Any) -> AstunerJob:
    """Return a job with steps of 2 tasks × 4 episodes."""
    rows = [{"question": f"question {i}", "answer": "", "unlucky": i % 2 == 0} for i in range(6)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "val.jsonl").write_text("".join(json.dumps(row | {"question": "?"}) + "\n" for row in rows[:2]))
    values: dict[str, Any] = {
        "experiment_name": "run",
        "backbone": "verl",
        "model__renderer": "qwen3",
        "data__train_batch_size": 2,
        "data__shuffle": False,
        "rollout__num_repeat": 4,
        "rollout__temperature": 1.0,
        "rollout__max_response_length_in_one_turn": 6,
        "rollout__max_model_len": 256,
        "rollout__compute_madness_checklist": [],
        "rollout__val_kwargs__temperature": 1.0,
        "rollout__val_kwargs__do_sample": True,
        "trainer_common__mini_batch_num": 2,
        "trainer_common__save_freq": 1,
        "trainer_common__use_kl_loss": False,
        "trainer_common__optim__lr": 1e-2,
        "trainer_common__val_pass_n": 2,
    }
    job = AstunerJob(algorithm="grpo", model=model, **(values | settings))
    job.set_workflow(f"{AGENTS}->{workflow}")
    return job.set_data("file", folder / "train.jsonl", validation_path=folder / "val.jsonl")

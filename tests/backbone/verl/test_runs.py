"""Whole runs of the verl backbone on a random model, and what may happen to them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.run_record import read_index, read_metrics
from tests.backbone.runs import Run, losses

pytestmark = [pytest.mark.verl, pytest.mark.slow]

AGENTS = Path(__file__).parent / "accidents.py"


def make_job(workflow: str, model: Path, folder: Path, **settings: Any) -> AstunerJob:
    """A job of steps of 2 tasks × 4 episodes."""
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


def test_a_run_survives_what_happens_to_episodes_and_workers(model_folder: Path, tmp_path: Path):
    job = make_job(
        "EpisodeAccidents",
        model_folder,
        tmp_path,
        rollout__episode_timeout=15.0,
        trainer_common__total_training_steps=3,
        trainer_common__val_before_train=True,
        trainer_common__test_freq=1,
    )
    run = Run(job, tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert "an episode worker was lost in train step 2" in printed
    assert list(losses(run.record)) == [1, 2, 3]
    index = list(read_index(run.record))
    kinds = Counter((entry.step, entry.split, entry.error_kind) for entry in index)
    assert kinds[1, "train", "workflow"] == 2
    assert kinds[1, "train", "timeout"] == 1
    assert kinds[2, "train", "workflow"] == kinds[2, "train", None] == 4
    assert kinds[2, "val", "workflow"] == kinds[0, "val", None] == kinds[3, "val", None] == 4
    summary = json.loads((run.record / "summary.json").read_text())
    assert summary["backbone"] == "verl"
    assert summary["steps"] == 3
    assert summary["episodes"] == {"ok": 5 + 4 + 8, "failed": 3 + 4, "dropped": 0}
    assert summary["validation"]["after"]["episodes"] == 4
    for row in read_metrics(run.record):
        if "logprob_difference" in row.metrics:
            assert 0 < row.metrics["logprob_difference"] < 1e-4
            assert row.metrics["update/optimiser_steps"] == 2
    assert {path.name for path in (run.record / "plots").iterdir()} == {"reward.png", "loss.png"}
    assert (run.record / "model" / "model.safetensors").exists()


def test_a_run_goes_on_after_its_engine_died_and_its_driver_was_killed(model_folder: Path, tmp_path: Path):
    job = make_job("EngineAccident", model_folder, tmp_path, trainer_common__total_training_steps=5)
    first = Run(job, tmp_path)
    code, printed = first.ended()
    assert code == 1, printed
    assert "a rollout engine is gone" in printed
    assert first.leftovers() == []
    second = Run(job, tmp_path)
    second.wait_for(step=3)
    second.process.send_signal(signal.SIGKILL)
    second.process.wait()
    assert second.leftovers() == []
    assert "going on from the checkpoint of step 2" in second.log.read_text()
    third = Run(job, tmp_path)
    code, printed = third.ended()
    assert code == 0, printed
    assert third.leftovers() == []
    assert json.loads((third.record / "summary.json").read_text())["steps"] == 5
    # The local backbone does the same steps, and nothing happens to it.
    (tmp_path / "local").mkdir()
    whole = make_job("Letters", model_folder, tmp_path / "local", trainer_common__total_training_steps=5)
    tuned = whole.configure({"backbone": "local"}).tune(tmp_path / "local" / "records")
    assert losses(third.record) == pytest.approx(losses(tuned.record), rel=1e-2, abs=1e-5)


def test_ctrl_c_saves_the_last_whole_step(model_folder: Path, tmp_path: Path):
    settings = {"trainer_common__total_training_steps": 10_000, "trainer_common__total_epochs": 10_000}
    run = Run(make_job("Letters", model_folder, tmp_path, trainer_common__save_freq=10_000, **settings), tmp_path)
    run.wait_for(step=2)
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal tells all of them
    code, printed = run.ended()
    assert code == 130, printed
    assert run.leftovers() == []
    last = max(losses(run.record))
    (checkpoint,) = (run.record / "checkpoints").glob("step_*")
    assert checkpoint.name == f"step_{last:06d}"
    assert (checkpoint / "model" / "model.safetensors").exists()

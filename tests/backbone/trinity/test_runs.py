"""Runs of the trinity backbone on a random model: records, crashes and resuming."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from astuner import AstunerJob
from astuner.run_record import read_index, read_metrics
from tests.backbone.runs import Run, losses
from tests.backbone.sampling_runs import SELECTING, check_kill_and_resume
from tests.backbone.trinity.runs import trinity_job
from tests.backbone.verl.runs import AGENTS

pytestmark = pytest.mark.trinity


def test_run_is_recorded_like_any_other(model_folder: Path, tmp_path: Path):
    settings = {
        "trainer_common__total_training_steps": 3,
        "trainer_common__val_before_train": True,
        "trainer_common__test_freq": 2,
    }
    # Ray's actors have the event loop policy of uvloop, which has no child watcher.
    job = trinity_job(model_folder, tmp_path, "StartsAProgram", **settings).set_judge(f"{AGENTS}->ComputesInASandbox")
    run = Run(job, tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert list(losses(run.record)) == [1, 2, 3]
    for row in read_metrics(run.record):
        if "loss/policy" in row.metrics:
            assert row.metrics["update/optimiser_steps"] == 2
            assert 0 <= row.metrics["staleness/max"] <= 1
            assert 0 <= row.metrics["backlog/steps"] <= 2
            assert row.metrics["grad_norm"] > 0
    index = Counter((entry.step, entry.split, entry.status) for entry in read_index(run.record))
    assert index == {
        (1, "train", "ok"): 8,
        (2, "train", "ok"): 8,
        (3, "train", "ok"): 8,
        (0, "val", "ok"): 4,
        (2, "val", "ok"): 4,
        (3, "val", "ok"): 4,
    }
    summary = json.loads((run.record / "summary.json").read_text())
    assert summary["backbone"] == "trinity"
    assert summary["steps"] == 3
    assert summary["validation"]["after"]["episodes"] == 4
    assert (run.record / "model" / "model.safetensors").exists()


def test_a_step_whose_rewards_are_extreme_is_recorded_and_explained(model_folder: Path, tmp_path: Path):
    run = Run(trinity_job(model_folder, tmp_path, "ExtremeRewards", trainer_common__total_training_steps=4), tmp_path)
    code, printed = run.ended()
    assert code == 1, printed
    assert run.leftovers() == []
    assert "step 2: " in printed
    assert "the rewards of 8 episodes are extreme: train-000002-" in printed
    assert {entry.advantage is None for entry in read_index(run.record) if entry.step == 1} == {False}
    assert [entry.lacks_advantage for entry in read_index(run.record) if entry.step == 2] == [True] * 8


def test_temperature_and_adapters_of_the_run_reach_the_tinker_server(model_folder: Path, tmp_path: Path):
    settings: dict[str, Any] = {
        "rollout__temperature": 0.7,
        "model__lora__rank": 4,
        "model__lora__alpha": 64,
        "model__lora__target_modules": ["q_proj", "down_proj"],
        "asynchrony__max_staleness": 0,
        "trainer_common__mini_batch_num": 1,
        "trainer_common__use_kl_loss": True,
        "trainer_common__total_training_steps": 2,
    }
    run = Run(trinity_job(model_folder, tmp_path, **settings), tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    trained = [row.metrics for row in read_metrics(run.record) if "loss/policy" in row.metrics]
    assert len(trained) == 2
    # On-policy: the trainer's log-probabilities are those of the sampler, and at first also those of the reference.
    assert all(metrics["logprob_difference"] < 1e-4 for metrics in trained)
    assert abs(trained[0]["loss/kl"]) < 1e-6
    assert trained[1]["loss/kl"] > 1e-6
    base, tuned = load_file(model_folder / "model.safetensors"), load_file(run.record / "model" / "model.safetensors")
    changed = {name.split(".")[-2] for name, value in base.items() if not torch.equal(value, tuned[name])}
    assert changed == {"q_proj", "down_proj"}
    # The checkpoint is the tuned model only if its adapters are merged with this alpha.
    (description,) = (run.record / "tinker").glob("*/run.json")
    assert json.loads(description.read_text())["policy"] == {
        "temperature": 0.7,
        "lora_alpha": 64,
        "lora_target_modules": ["q_proj", "down_proj"],
    }


def check_resumes(job: AstunerJob, folder: Path) -> None:
    """Check that the same command runs the rest of six steps."""
    second = Run(job, folder)
    code, printed = second.ended()
    assert code == 0, printed
    assert "resuming from the checkpoint of step" in printed
    assert list(losses(second.record)) == [1, 2, 3, 4, 5, 6]
    assert json.loads((second.record / "summary.json").read_text())["steps"] == 6


def test_an_interrupted_run_saves_its_last_step_and_resumes(model_folder: Path, tmp_path: Path):
    job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=6, trainer_common__save_freq=100)
    saved = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        run = Run(job, tmp_path)
        run.wait_for(step=saved + 1)
        run.process.send_signal(number)
        code, printed = run.ended()
        assert code == 128 + number, printed
        assert run.leftovers() == []
        steps = list(losses(run.record))
        assert f"run the same command again to resume from the checkpoint of step {steps[-1]}" in printed
        progress = json.loads((run.record / "checkpoints" / f"step_{steps[-1]:06d}" / "progress.json").read_text())
        assert steps == [*range(1, progress["step"] + 1)]
        assert progress["totals"]["ok"] == 8 * progress["step"]
        assert f"resuming from the checkpoint of step {saved}" in printed or not saved
        saved = progress["step"]
    check_resumes(job, tmp_path)
    index = Counter(entry.step for entry in read_index(tmp_path / "records" / "run") if entry.split == "train")
    assert index == dict.fromkeys(range(1, 7), 8)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["Explorer", "Trainer"])
def test_killed_actor_is_named_and_the_run_resumes(model_folder: Path, tmp_path: Path, role: str):
    job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=6)
    first = Run(job, tmp_path)
    first.wait_for(step=2)
    first.actor(role).send_signal(signal.SIGKILL)
    code, printed = first.ended()
    assert code == 1, printed
    assert "Run the same command again to resume from the last checkpoint" in printed
    assert f"a Trinity process died while running the {role.lower()}" in printed
    assert first.leftovers() == []
    check_resumes(job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "message"),
    [("WorkflowRunner", "a process that ran episodes died"), ("Tinker server", "the Tinker server, which trains and")],
)
def test_killed_process_is_named(model_folder: Path, tmp_path: Path, process: str, message: str):
    run = Run(trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=1000), tmp_path)
    run.wait_for(step=1)
    victim = run.actor(process) if process == "WorkflowRunner" else run.command("serve-tinker")
    victim.send_signal(signal.SIGKILL)
    code, printed = run.ended()
    assert code == 1, printed
    assert message in printed
    assert "Run the same command again to resume from the last checkpoint" in printed
    assert run.leftovers() == []


@pytest.mark.slow
def test_tinker_server_killed_during_startup_is_named(model_folder: Path, tmp_path: Path):
    run = Run(trinity_job(model_folder, tmp_path), tmp_path)
    run.wait_until_actor("Explorer")
    run.command("serve-tinker").send_signal(signal.SIGKILL)
    code, printed = run.ended()
    assert code == 1, printed
    assert "the Tinker server, which trains and samples, exited with code" in printed
    assert run.leftovers() == []


@pytest.mark.slow
def test_run_resumes_after_its_driver_was_killed(model_folder: Path, tmp_path: Path):
    job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=6)
    first = Run(job, tmp_path)
    first.wait_for(step=2)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert first.leftovers() == []
    check_resumes(job, tmp_path)


@pytest.mark.slow
def test_an_episode_that_ends_its_process_costs_this_episode_only(model_folder: Path, tmp_path: Path):
    job = trinity_job(model_folder, tmp_path, "ExitsItsProcess", trainer_common__total_training_steps=3)
    run = Run(job, tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert list(losses(run.record)) == [1, 2, 3]
    kinds = Counter((entry.step, entry.error_kind) for entry in read_index(run.record) if entry.split == "train")
    assert kinds == {(1, None): 8, (2, None): 7, (2, "worker"): 1, (3, None): 8}
    assert "an episode host was lost" not in printed


@pytest.mark.slow
def test_run_with_a_policy_resumes(model_folder: Path, tmp_path: Path):
    settings = {"rollout__temperature": 0.7, "model__lora__rank": 4, "model__lora__alpha": 64}
    job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=6, **settings)
    first = Run(job, tmp_path)
    first.wait_for(step=2)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert first.leftovers() == []
    check_resumes(job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_tasks_depend_on_earlier_results_also_after_a_kill(model_folder: Path, tmp_path: Path, steps_ahead: int):
    job = trinity_job(model_folder, tmp_path, **SELECTING, asynchrony__max_staleness=steps_ahead)
    check_kill_and_resume(job, tmp_path, 6, steps_ahead)

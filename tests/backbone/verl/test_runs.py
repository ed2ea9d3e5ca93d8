"""Complete runs of the verl backbone: failures, resuming, interrupts and configuration errors."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from astuner.config.loading import with_values
from astuner.config.root import RunConfig
from astuner.errors import BackboneError
from astuner.run_record import read_index, read_metrics
from tests.backbone.local.conftest import AGENTS as LOCAL_AGENTS
from tests.backbone.runs import Run, error_beside_a_record, losses
from tests.backbone.sampling_runs import SELECTING, check_batches
from tests.backbone.verl.runs import make_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_a_run_survives_failures_of_episodes_and_workers(model_folder: Path, tmp_path: Path):
    job = make_job(
        "EpisodeFailures",
        model_folder,
        tmp_path,
        rollout__episode_timeout=15.0,
        trainer_common__total_training_steps=3,
        trainer_common__val_before_train=True,
        trainer_common__test_freq=1,
        deadlines__rollout=7.0,
    )
    run = Run(job, tmp_path)
    run.wait_for_output("the rollout has taken")
    run.process.send_signal(signal.SIGUSR1)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    late, _, requested = printed.partition("state of the process:")
    for report in (late, requested):
        assert "last finished LLM call train-000001-" in report
        assert "await asyncio.sleep(1000)" in report
    assert "an episode host was lost in train step 2" in printed
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
    assert (run.record / "model" / "model.safetensors").exists()


def test_a_run_resumes_after_each_way_to_end_early(model_folder: Path, tmp_path: Path):
    """Extreme rewards, the death of the engine, of the driver, and a signal from Slurm.

    The tasks of each step depend on the results of earlier ones.
    """
    settings = {**SELECTING, "trainer_common__total_epochs": 10_000}
    job = make_job("ExtremeRewardsOrDeadEngine", model_folder, tmp_path, **settings)
    job.configure({"task_reader.type": "mixture", "trainer_common.total_training_steps": 10_000})
    first = Run(job, tmp_path, EXTREME_REWARDS="1")
    code, printed = first.ended()
    assert code == 1, printed
    assert first.leftovers() == []
    assert "the rewards of 8 episodes are extreme: train-000002-" in printed
    assert {entry.advantage is None for entry in read_index(first.record) if entry.step == 1} == {False}
    assert [entry.lacks_advantage for entry in read_index(first.record) if entry.step == 2] == [True] * 8
    second = Run(job, tmp_path)
    code, printed = second.ended()
    assert code == 1, printed
    assert "resuming from the checkpoint of step 1" in printed
    assert "a rollout engine failed" in printed
    assert second.leftovers() == []
    third = Run(job, tmp_path)
    third.wait_for(step=3)
    third.process.send_signal(signal.SIGKILL)
    third.process.wait()
    assert third.leftovers() == []
    assert "resuming from the checkpoint of step 2" in third.log.read_text()
    # Slurm signals all processes.
    fourth = Run(job, tmp_path, "astuner.trainer_common.save_freq=10000")
    fourth.wait_for(step=5)
    os.killpg(fourth.process.pid, signal.SIGTERM)
    last = check_saved(fourth, signal.SIGTERM)
    assert "resuming from the checkpoint of step" in fourth.log.read_text()
    check_batches(fourth.record, job.config.astuner, last)
    # The local backbone does the same steps without interruption.
    (tmp_path / "local").mkdir()
    full_job = make_job("Letters", model_folder, tmp_path / "local", **settings)
    full_job.configure({
        "backbone": "local", "task_reader.type": "mixture", "trainer_common.total_training_steps": last
    })  # fmt: skip
    tuned = full_job.tune(tmp_path / "local" / "records")
    assert losses(fourth.record) == pytest.approx(losses(tuned.record), rel=1e-2, abs=1e-5)


def check_saved(run: Run, number: signal.Signals) -> int:
    """Check that a run ends after a signal with a checkpoint of its last complete step, and return the step."""
    code, printed = run.ended()
    assert code == 128 + number, printed
    assert run.leftovers() == []
    last = max(losses(run.record))
    checkpoint = max((run.record / "checkpoints").glob("step_*"))
    assert checkpoint.name == f"step_{last:06d}"
    assert (checkpoint / "model" / "model.safetensors").exists()
    return last


def test_a_missing_vllm_is_an_error_on_gpus_and_set_aside_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl import backbone

    monkeypatch.setattr(backbone, "is_installed", lambda name: False)
    run = with_values(RunConfig(), {"astuner.rollout.name": "vllm"}).astuner
    with pytest.raises(BackboneError, match=r"vLLM is not installed; run: astuner install verl$"):
        backbone._rollout_engine(run, torch.device("cuda"))
    assert backbone._rollout_engine(run, torch.device("cpu")) == "embedded"


def test_the_embedded_engine_is_set_aside_on_gpus(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl import backbone

    monkeypatch.setattr(backbone, "is_installed", lambda name: True)
    run = with_values(RunConfig(), {"astuner.rollout.name": "embedded"}).astuner
    assert backbone._rollout_engine(run, torch.device("cuda")) == "vllm"
    assert backbone._rollout_engine(run, torch.device("cpu")) == "embedded"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("verl.actor_rollout_ref.rollout.enable_prefix_cachin=false", "did you mean"),
        ("astuner.trainer_common.ulysses_sequence_parallel_size=2", "CUDA"),
        ("astuner.trainer_common.ray_address=127.0.0.2:1", "could not connect to Ray at 127.0.0.2:1"),
    ],
)
def test_an_invalid_configuration_does_not_move_the_earlier_record(
    model_folder: Path, tmp_path: Path, mistake: str, message: str
):
    assert message in error_beside_a_record(make_job("Letters", model_folder, tmp_path), tmp_path, mistake)


def test_groups_with_equal_rewards_are_replaced_by_further_tasks_until_ctrl_c(model_folder: Path, tmp_path: Path):
    settings = {
        "trainer_common__total_training_steps": 10_000,
        "trainer_common__total_epochs": 10_000,
        "trainer_common__save_freq": 10_000,
        "trainer_common__algorithm__dynamic_sampling": "refill",
    }
    job = make_job("Letters", model_folder, tmp_path, **settings)
    job.set_workflow(f"{LOCAL_AGENTS}->SomeEqual")
    run = Run(job, tmp_path)
    run.wait_for(step=2)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
    check_saved(run, signal.SIGINT)
    assert len(list((run.record / "checkpoints").glob("step_*"))) == 1
    row = next(row.metrics for row in read_metrics(run.record) if "refill/tasks" in row.metrics)
    # Every second task has equal rewards: the batch has one of them, and so has the first refill.
    expected = {"refill/batches": 2, "refill/tasks": 2, "refill/missing_groups": 0, "episodes/total": 16}
    assert {name: row[name] for name in expected} == expected
    assert row["update/optimiser_steps"] == 2
    first = [entry for entry in read_index(run.record) if (entry.split, entry.step) == ("train", 1)]
    trained = {entry.task_id: bool(entry.advantage) for entry in first}
    assert sorted(trained.values()) == [False, False, True, True]

"""Runs of the trinity backbone with various settings, and with invalid ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from astuner.run_record import read_index, read_metrics
from astuner.system.localhost import free_port
from tests.backbone.runs import Run, error_beside_a_record, losses
from tests.backbone.trinity.runs import trinity_job

pytestmark = pytest.mark.trinity

SETTINGS = {
    "trainer_driven": ({"asynchrony__sync_style": "trainer_driven", "trainer_common__test_freq": 2}, 1),
    "fully_async": ({"asynchrony__sync_style": "fully_async"}, 1),
    "sync of every second step": ({"asynchrony__sync_interval": 2, "asynchrony__max_staleness": 2}, 2),
    "no asynchrony": ({"asynchrony__max_staleness": 0}, 0),
    "adapters": ({"model__lora__rank": 4, "model__lora__alpha": 32}, 1),
}
"""Settings and the maximum staleness that they allow."""


@pytest.mark.slow
@pytest.mark.parametrize("choice", SETTINGS)
def test_every_step_is_trained_within_the_staleness_limit(choice: str, model_folder: Path, tmp_path: Path):
    settings, max_staleness = SETTINGS[choice]
    job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=4, **settings)
    if choice == "fully_async":
        job.set_data("file", tmp_path / "train.jsonl")
    run = Run(job, tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert list(losses(run.record)) == [1, 2, 3, 4]
    trained = [row.metrics for row in read_metrics(run.record) if "loss/policy" in row.metrics]
    assert max(row["staleness/max"] for row in trained) <= max_staleness
    assert all(row["correction/gap_max"] >= row["correction/gap_mean"] for row in trained)
    # The tokens of each step are measured by their staleness, if samples may be stale.
    measured = [{name for name in row if name.startswith("correction/gap_mean/stale_")} for row in trained]
    assert all(measured) == any(measured) == (max_staleness > 0)
    assert len([entry for entry in read_index(run.record) if entry.split == "train" and entry.status == "ok"]) == 32
    assert (run.record / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_slowest_tasks_are_dropped_and_counted(model_folder: Path, tmp_path: Path):
    settings: dict[str, Any] = {"asynchrony__over_rollout": 0.5, "asynchrony__over_rollout_wait": 2.0}
    settings |= {"rollout__max_env_worker": 8, "trainer_common__total_training_steps": 2}
    run = Run(trinity_job(model_folder, tmp_path, "UnluckyHang", **settings), tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    lost = [entry for entry in read_index(run.record) if entry.split == "train" and entry.status != "ok"]
    assert len(lost) == 8
    assert list(losses(run.record)) == [1, 2]
    assert "asynchrony.over_rollout" in printed


@pytest.mark.slow
def test_step_without_reward_stays_in_sync_with_the_trainer(model_folder: Path, tmp_path: Path):
    settings = {"trainer_common__total_training_steps": 3, "rollout__max_retries": 0}
    run = Run(trinity_job(model_folder, tmp_path, "SecondStepFails", **settings), tmp_path)
    code, printed = run.ended()
    assert code == 0, printed
    assert list(losses(run.record)) == [1, 3]
    assert len([entry for entry in read_index(run.record) if entry.step == 2 and entry.status == "failed"]) == 8
    backlogs = {
        row.step: row.metrics["backlog/steps"] for row in read_metrics(run.record) if "loss/policy" in row.metrics
    }
    assert backlogs[3] == 0
    assert (run.record / "checkpoints" / "step_000002").is_dir()


@pytest.mark.slow
def test_run_uses_the_ray_of_with_ray(model_folder: Path, tmp_path: Path):
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        job = trinity_job(model_folder, tmp_path, trainer_common__total_training_steps=1)
        run = Run(job, tmp_path, "--with-ray", RAY_TMPDIR=short)
        code, printed = run.ended()
        assert code == 0, printed
        assert "service ray: ready after" in printed
        assert list(losses(run.record)) == [1]
        assert run.leftovers() == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trinity.buffer.explorer_inputs.x=1", "did you mean"),
        ("trinity.model.tinker.base_url=https://tinker.example", "TINKER_API_KEY is not set"),
        ("astuner.trainer_common.ray_address=127.0.0.2:1", "could not connect to Ray at 127.0.0.2:1"),
    ],
)
def test_invalid_setting_leaves_the_earlier_record_in_place(
    model_folder: Path, tmp_path: Path, override: str, message: str
):
    assert message in error_beside_a_record(trinity_job(model_folder, tmp_path), tmp_path, override)


def test_values_that_a_tinker_service_does_not_support_are_rejected(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKER_API_KEY", "tml-mine")
    address = f"http://127.0.0.1:{free_port()}"
    overrides = (f"trinity.model.tinker.base_url={address}", "astuner.rollout.temperature=0.5")
    printed = error_beside_a_record(trinity_job(model_folder, tmp_path), tmp_path, *overrides)
    fix = "or remove trinity.model.tinker.base_url, so that the run starts its own server"
    assert f"rollout.temperature is 0.5, and the Tinker service at {address} trains at temperature 1" in printed
    assert f"write 1.0, {fix}" in printed
    assert f"model.lora.rank is 0, and the Tinker service at {address} trains adapters only; write 32, {fix}" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"asynchrony__sync_style": "fully_async", "asynchrony__max_staleness": 0},
            "asynchrony.sync_style is 'fully_async', and no step may run ahead",
        ),
        (
            {"model__lora": {"rank": 4, "target_modules": ["nose"]}},
            "model.lora.target_modules ['nose'] does not fit this model",
        ),
    ],
    ids=["asynchrony", "target modules"],
)
def test_faults_of_the_configuration_are_rejected_before_ray_starts(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
):
    for words in ([], ["--with-ray"]):
        folder = tmp_path / f"options{len(words)}"
        folder.mkdir()
        printed = error_beside_a_record(trinity_job(model_folder, folder, **settings), folder, *words)
        assert message in " ".join(printed.split())
        assert "service ray" not in printed
        assert "starting Ray" not in printed

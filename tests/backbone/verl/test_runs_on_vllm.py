"""A complete run that samples from vLLM on a CPU, and recovery after vLLM's process has died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astuner.errors import ModelError
from astuner.run_record import read_metrics
from tests.backbone.runs import Run, losses
from tests.backbone.verl.runs import make_job

pytestmark = pytest.mark.verl_vllm


def test_a_run_detects_a_dead_vllm_process_and_resumes(model_for_vllm: Path, tmp_path: Path):
    settings = {"rollout__name": "vllm", "rollout__max_num_seqs": 16, "trainer_common__total_training_steps": 3}
    job = make_job("EngineCoreDies", model_for_vllm, tmp_path, **settings)
    first = Run(job, tmp_path)
    code, printed = first.ended()
    assert code == 1, printed
    assert "a rollout engine failed: vLLM's engine process (EngineCore) died" in printed
    assert "Run the same command again to resume from the last checkpoint" in printed
    assert first.leftovers() == []
    assert list(losses(first.record)) == [1]

    second = Run(job, tmp_path)
    code, printed = second.ended()
    assert code == 0, printed
    assert "resuming from the checkpoint of step 1" in printed
    assert second.leftovers() == []
    assert list(losses(second.record)) == [1, 2, 3]
    summary = json.loads((second.record / "summary.json").read_text())
    assert (summary["steps"], summary["episodes"]["failed"]) == (3, 0)
    # vLLM sampled with the latest weights: with this learning rate, older ones would differ more.
    rows = [row.metrics for row in read_metrics(second.record) if "loss/policy" in row.metrics]
    assert len(rows) == 3
    assert all(0 < metrics["logprob_difference"] < 1e-4 for metrics in rows)


def test_an_unsupported_model_is_rejected_before_anything_starts(model_folder: Path, tmp_path: Path):
    job = make_job("Letters", model_folder, tmp_path, rollout__name="vllm")
    with pytest.raises(ModelError, match=r"has attention heads of size 16; on a CPU, vLLM supports sizes 32, 64, 80"):
        job.tune(tmp_path / "records")

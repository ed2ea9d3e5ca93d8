"""A run with vLLM and verl's workers under Trinity, on a CPU that simulates two GPUs (`on_cpu/`)."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from astuner.run_record import read_index, read_metrics
from tests.backbone.runs import Run, losses
from tests.backbone.trinity.runs import trinity_job

pytestmark = [pytest.mark.trinity, pytest.mark.slow]

_GPU_SIMULATION = Path(__file__).parent / "on_cpu"
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(_GPU_SIMULATION), os.environ.get("PYTHONPATH")))),
    "CUDA_VISIBLE_DEVICES": "0,1",  # Ray compares it with its resources
    "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 2}),
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# Settings that a CPU requires.
_OVERRIDES = ("trinity.explorer.rollout_model.enforce_eager=true",)


@pytest.mark.parametrize(("number", "save_freq"), [(signal.SIGKILL, 1), (signal.SIGTERM, 100)])
def test_run_on_vllm_and_verl_resumes_after_a_signal(model_for_vllm: Path, tmp_path: Path, number: int, save_freq: int):
    settings = {
        "trainer_common__total_training_steps": 3,
        "trainer_common__save_freq": save_freq,
        "trainer_common__device": "cuda",
        # Sampling and training use the same weights, so that their logprobs must agree.
        "trainer_common__mini_batch_num": 1,
        "asynchrony__max_staleness": 0,
        "rollout__max_num_seqs": 16,
        "rollout__n_vllm_engine": 1,
    }
    job = trinity_job(model_for_vllm, tmp_path, **settings)
    first = Run(job, tmp_path, *_OVERRIDES, **_ENVIRONMENT)
    first.wait_for(step=2)
    first.process.send_signal(number)
    code, printed = first.ended()
    assert code == (-number if number == signal.SIGKILL else 128 + number), printed
    assert first.leftovers() == []

    second = Run(job, tmp_path, *_OVERRIDES, **_ENVIRONMENT)
    code, printed = second.ended()
    assert code == 0, printed
    assert "resuming from the checkpoint of step" in printed
    assert second.leftovers() == []
    assert list(losses(second.record)) == [1, 2, 3]
    for row in read_metrics(second.record):
        if "loss/policy" in row.metrics:
            assert row.metrics["update/optimiser_steps"] == 1
            assert row.metrics["grad_norm"] > 0
            assert row.metrics["update/computed_per_distinct_token"] >= 1
            assert row.metrics["staleness/max"] == 0
            # The tolerance is for bfloat16; with this learning rate, other weights exceed it.
            assert 0 < row.metrics["logprob_difference"] < 0.05
    index = Counter((entry.step, entry.split, entry.status) for entry in read_index(second.record))
    assert index == {(1, "train", "ok"): 8, (2, "train", "ok"): 8, (3, "train", "ok"): 8, (3, "val", "ok"): 4}
    summary = json.loads((second.record / "summary.json").read_text())
    assert summary["backbone"] == "trinity"
    assert summary["steps"] == 3
    assert summary["validation"]["after"]["episodes"] == 4
    assert (second.record / "model" / "model.safetensors").exists()

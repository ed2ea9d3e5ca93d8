"""The benchmarks run, and their counts for a workload are correct. Their speed is not tested."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from tests.preloaded import run_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench"
# Two turns, a retry of the second, and another agent.
WORKLOAD = [
    {"agent": "a", "prompt_ids": [1, 2, 3], "completion_ids": [4, 5]},
    {"agent": "a", "prompt_ids": [1, 2, 3, 4, 5, 6], "completion_ids": [7]},
    {"agent": "a", "prompt_ids": [1, 2, 3, 4, 5, 6], "completion_ids": [8, 9]},
    {"agent": "b", "prompt_ids": [2], "completion_ids": [2]},
]


def run(benchmark: str, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_python(FOLDER / benchmark, "--workload", path, *more)


def report(benchmark: str, folder: Path, *more: str) -> dict[str, Any]:
    path = folder / "example.json"
    path.write_text(json.dumps(WORKLOAD))
    process = run(benchmark, path, *more)
    assert process.returncode == 0, process.stderr
    (line,) = process.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    assert (result["workload"], result["raw_tokens"], result["distinct_tokens"]) == ("example", 22, 11)
    return result


def printed(benchmark: str, *words: str | Path, timeout: float = 300) -> list[dict[str, Any]]:
    """Run a benchmark, and return the lines of JSON that it prints."""
    process = run_python(FOLDER / benchmark, *words, timeout=timeout)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def last_line(benchmark: str, *words: str | Path, timeout: float = 300) -> dict[str, Any]:
    """Run a benchmark, and return the result in its last line."""
    return printed(benchmark, *words, timeout=timeout)[-1]


def test_merging(tmp_path: Path):
    result = report("bench_merge.py", tmp_path)
    assert {name: result[name] for name in ("calls", "samples", "trained_tokens", "certificate")} == {
        "calls": 4,
        "samples": 3,
        "trained_tokens": 6,
        "certificate": 1.0,
    }
    assert result["merge_seconds"] > 0


def test_updating(tmp_path: Path):
    result = report("bench_update.py", tmp_path, "--repeats", "1")
    assert set(result["cpu_seconds"]) == {"none", "leaf", "tree", "auto"}
    assert set(result["grad_rel_diff"]) == {"leaf", "tree", "auto"}
    assert max(result["grad_rel_diff"].values()) <= 1e-5


def test_a_whole_step_of_many_episodes():
    result = last_line("bench_scale.py", "--workload", "local", "--episodes", "16")
    assert (result.pop("episodes"), result.pop("calls")) == (16, 1)
    names = {"driver_bytes_per_episode", "episodes_per_second", "record_seconds", "peak_rss_gb"}
    assert result.keys() == names
    assert result["driver_bytes_per_episode"] > 0
    assert result["episodes_per_second"] > 0


def test_an_episode_holds_its_distinct_tokens():
    words = ("--episodes", "8", "--calls", "30", "--context", "30000")
    result = last_line("bench_scale.py", *words, timeout=600)
    assert (result["episodes"], result["calls"]) == (8, 30)
    assert 30_000 * 4 < result["driver_bytes_per_episode"] <= 300_000


@pytest.mark.verl
def test_rows_are_stored_in_a_transfer_queue():
    result = last_line("bench_transfer_queue.py", "--rows", "100")
    assert result.pop("rows") == 100
    assert result.keys() == {"store_seconds", "add_field_seconds", "read_seconds", "delete_seconds"}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"a": 1}', '[{"prompt_ids": [1]}]', '[{"prompt_ids": [1], "completion_ids": ["x"]}]']
)
def test_invalid_workload_file_is_rejected(tmp_path: Path, text: str):
    path = tmp_path / "broken.json"
    path.write_text(text)
    process = run("bench_merge.py", path)
    assert process.returncode == 1
    assert "broken.json" in process.stderr
    assert "expected a JSON list of calls" in process.stderr
    assert "Traceback" not in process.stderr


def test_isolation():
    result = last_line("bench_isolation.py", "--episodes", "2", "--workers", "2", "--pairs", "1")
    assert (result["episodes"], result["workers"], result["pairs"]) == (2, 2, 1)
    assert 0 < result["worker_uss_mb"] < result["worker_pss_mb"]


def test_the_cost_of_certificate_and_correction(model_folder: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "question {number}"}}\n' for number in range(4)))
    job = AstunerJob(model=model_folder, model__renderer="qwen3", data__train_batch_size=2, rollout__num_repeat=4)
    settings = {"max_response_length_in_one_turn": 6, "max_model_len": 256, "compute_madness_checklist": []}
    job.configure({f"rollout.{name}": value for name, value in settings.items()})
    job.set_workflow(f"{ROOT / 'tests/backbone/local/agents.py'}->Letters")
    conf = job.set_data("file", tmp_path / "tasks.jsonl").dump_job_as_yaml(tmp_path / "small.yaml")
    result = last_line("bench_sync.py", "--conf", conf, "--steps", "2")["small"]
    assert result["steps"] > 0
    for name in ("checksums", "logprobs", "certificate_of_run", "correction"):
        assert 0 < result[f"time/{name}"] < 1


def test_the_gateway_loses_and_crosses_no_call():
    result = last_line("bench_gateway.py", "--calls", "100", "--clients", "8", "--pairs", "10")
    assert (result["calls"], result["lost"], result["crossed"]) == (160, 0, 0)
    assert result["calls_per_second_8"] > 0


def test_the_speed_of_rescoring_is_measured():
    (result,) = printed("bench_rescore.py", "--episodes", "64", "--tokens", "4", "--runs", "1")
    assert result["episodes"] == 64
    assert result["episodes_per_second"] > 0


@pytest.mark.long
def test_linear_layers():
    result = last_line("bench_linear.py", "--rounds", "1")
    rates = [rate for products in result["gflops"].values() for sides in products.values() for rate in sides.values()]
    assert len(rates) in (16, 32)  # 8 products by PyTorch and astuner, in one or two dtypes
    assert min(rates) > 0


@pytest.mark.long
def test_engines_and_training_of_a_real_model_sample_equally_many_tokens(model_folder: Path):
    small = ("--prompts", "2", "--group", "2", "--tokens", "3", "--steps", "1", "--warm-up", "0", "--rounds", "1")
    small += ("--requests", "2", "1", "--dtypes", "float32")
    lines = printed("bench_real_model.py", "--model", model_folder, *small, timeout=600)
    _, sampling, _, step, shares, result = lines
    assert step["frameworks"]["astuner"]["seconds"] > 0
    engines = {"astuner float32", "transformers float32", "transformers_continuous float32"}
    assert {name: values["sampled_tokens"] for name, values in sampling["engines"].items()} == dict.fromkeys(engines, 6)
    assert set(result) == {"step_ratio_to_trl", "sampling_tokens_per_second", "gemm_share"}
    assert result["step_ratio_to_trl"] is None
    # The result is that of the largest number of requests.
    rates = {name: values["tokens_per_second"] for name, values in sampling["engines"].items()}
    assert result["sampling_tokens_per_second"] == rates
    assert result["gemm_share"] == shares["gemm_shares"]["float32"] > 0
    assert shares["step_gemm_shares"]["float32"] > 0
    assert shares["bandwidth_shares"]["float32"] > 0


def test_the_operations_of_a_real_model_are_those_of_all_its_files(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(FOLDER))
    from machine_limits import Operations, Workload, bandwidth_shares, gemm_shares

    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert Operations.of(tmp_path) == Operations.of(model_folder)
    limits = {"gemm_gflops": {"float32": 400, "bfloat16": 800}, "read_gb_per_second": 8.0}
    assert gemm_shares({"float32": 200.0}, 1e9, limits) == {"float32": 0.5}
    operations = Operations(per_token=2_000, per_logits=200)
    assert bandwidth_shares({"bfloat16": 1e6}, operations, limits) == {"bfloat16": 0.275}
    # Sampling and, thrice, the update compute the 5 distinct prefixes of the prompts, and 4 answers of 5 tokens; the
    # head computes the answers only.
    workload = Workload([[1, 2, 3], [1, 5, 6]], group=2, tokens=5)
    assert operations.of_step(workload) == 4 * (2_000 * (5 + 20) + 200 * 20)
    assert operations.of_token(workload) == 2_000 * 7 / 5 + 200

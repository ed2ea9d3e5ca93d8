"""The settings of a vLLM server and the errors of invalid ones."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError, ModelError
from astuner.llm_engine.vllm_server.installation import InstalledVllm
from astuner.llm_engine.vllm_server.settings import VllmSettings, differences, settings_for

CPU = InstalledVllm("0.28.0", "cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's folder of which only config.json is read."""
    shape = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def settings(folder: Path, installed: InstalledVllm = CPU, **sections: Any) -> VllmSettings:
    return settings_for(AstunerConfig.model_validate(sections), str(folder), installed)


def option(made: VllmSettings, name: str) -> str | None:
    line = made.argv
    return line[line.index(name) + 1] if name in line else None


def test_the_defaults_on_a_cpu(model: Path) -> None:
    made = settings(model)
    assert made.argv[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    expected = {
        "--model": str(model),
        "--served-model-name": made.name,
        "--host": "127.0.0.1",
        "--port": "18000",
        "--seed": "12345",
        "--dtype": "float32",
        "--tensor-parallel-size": "1",
        "--max-model-len": "1024",  # the model has no more positions
        "--max-num-seqs": "64",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--gpu-memory-utilization": None,
    }
    assert {name: option(made, name) for name in expected} == expected
    assert {"--enforce-eager", "--disable-log-stats"} <= set(made.argv)


@pytest.mark.parametrize(
    ("sections", "name", "value"),
    [
        ({"debug": {"debug_vllm_port": 2000}}, "--port", "2000"),
        ({"debug": {"debug_vllm_seed": 7}}, "--seed", "7"),
        ({"model": {"dtype": "bfloat16"}}, "--dtype", "bfloat16"),
        ({"rollout": {"max_model_len": 300}}, "--max-model-len", "300"),
        ({"rollout": {"max_num_seqs": 5}}, "--max-num-seqs", "5"),
    ],
)
def test_each_key_sets_an_option_and_changes_the_servers_name(
    model: Path, sections: dict[str, Any], name: str, value: str
) -> None:
    made = settings(model, **sections)
    assert option(made, name) == value
    assert made.name != settings(model).name
    assert differences(settings(model), made)


def test_the_cache_on_a_cpu_fits_the_requests(model: Path) -> None:
    token_bytes = 2 * 1 * 32 * 2 * 4  # layers, heads, their size, keys and values, bytes
    made = settings(model, rollout={"max_model_len": 1000, "max_num_seqs": 8})
    assert made.kv_cache_bytes is not None
    assert 8 * 1000 * token_bytes <= made.kv_cache_bytes <= 8 * 1400 * token_bytes
    many = settings(model, rollout={"max_num_seqs": 10**5})
    assert option(many, "--kv-cache-memory-bytes") == str(4 * 2**30)


def test_environment_variables_of_the_user_take_precedence(model: Path) -> None:
    made = settings(model)
    env = made.environment({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "3"})
    assert (env["HF_HUB_OFFLINE"], env["OMP_NUM_THREADS"]) == ("1", "3")
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["VLLM_NO_USAGE_STATS"]) == ("nobind", "1")
    assert int(made.environment({})["OMP_NUM_THREADS"]) >= 1
    assert "OMP_NUM_THREADS" not in replace(made, device="cuda").environment({})


@pytest.mark.parametrize(
    ("rollout", "mode"),
    [
        ({"temperature": 0.9}, "processed_logprobs"),
        ({"temperature": 1.0, "top_p": 0.9}, "raw_logprobs"),
        ({"temperature": 0.0, "top_k": 5}, "processed_logprobs"),
        ({"temperature": 0.5, "top_k": 5}, "raw_logprobs"),
        ({"val_kwargs": {"do_sample": True, "temperature": 1.0, "top_p": 0.9}, "temperature": 1.0}, "raw_logprobs"),
        ({"val_kwargs": {"do_sample": False, "temperature": 1.0, "top_p": 0.9}}, "processed_logprobs"),
    ],
)
def test_logprobs_mode_matches_the_trainer(model: Path, rollout: dict[str, Any], mode: str, log: list[str]) -> None:
    assert settings(model, rollout=rollout).logprobs_mode == mode
    warned = [line for line in log if "with temperature and top_p or top_k together" in line]
    assert bool(warned) == (rollout.get("temperature") == 0.5)


def test_new_weights_need_a_new_server(model: Path) -> None:
    before = settings(model)
    assert settings(model) == before
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert differences(before, settings(model)).startswith("weights ")


def test_invalid_settings_are_rejected(model: Path) -> None:
    with pytest.raises(BackboneError, match=r"device is cuda, and the installed vLLM \(0\.28\.0\) is built for cpu"):
        settings(model, trainer_common={"device": "cuda"})
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"head_dim": 16}))
    with pytest.raises(ModelError, match=r"attention heads of size 16; on a CPU, vLLM supports sizes 32, 64"):
        settings(model)
    shutil.rmtree(model)
    with pytest.raises(ModelError, match="transformers cannot read the configuration"):
        settings(model)

"""The models of Tinker checkpoints, and the user's API key."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from astuner.backbone.training.lora import merged_weights, with_lora
from astuner.backbone.trinity.tinker_service import (
    KEY_VARIABLE,
    LocalTinkerServer,
    checkpoint_folder,
    save_checkpoint_model,
    save_merged,
    service_key,
)
from astuner.config.model import LoraConfig
from astuner.errors import ConfigError, ModelError
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.processes.guarded_process import GuardedProcess


def make_archive(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=".")
    return archive


def test_downloaded_adapters_are_merged(model_folder: Path, tmp_path: Path) -> None:
    model = with_lora(load_causal_lm(str(model_folder), torch.float32), LoraConfig(rank=4))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    save_merged(str(model_folder), make_archive(tmp_path / "adapters", tmp_path / "a.tar.gz"), tmp_path / "merged")
    merged = load_causal_lm(str(tmp_path / "merged"), torch.float32).state_dict()
    expected, start = merged_weights(model), load_causal_lm(str(model_folder), torch.float32).state_dict()
    torch.testing.assert_close(merged, {name: expected[name] for name in merged})
    assert not all(torch.equal(value, start[name]) for name, value in merged.items())


def test_archive_without_adapters_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has 0 adapter_config\.json; expected one"):
        save_merged(str(model_folder), make_archive(tmp_path / "empty", tmp_path / "a.tar.gz"), tmp_path / "merged")
    (tmp_path / "b.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"the adapters in b\.tar\.gz cannot be merged into "):
        save_merged(str(model_folder), tmp_path / "b.tar.gz", tmp_path / "merged")


def test_missing_api_key_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "tml-mine")
    assert service_key() == "tml-mine"
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match="environment variable TINKER_API_KEY is not set; export"):
        service_key()


def write_checkpoint(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "trained.safetensors")
    return folder


def test_fully_trained_weights_are_saved(model_folder: Path, tmp_path: Path):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    trained = {name: (value + 1).clone() for name, value in base.state_dict().items()}
    save_checkpoint_model(str(model_folder), write_checkpoint(trained, tmp_path / "checkpoint"), tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


def test_adapters_of_the_local_server_are_merged(model_folder: Path, tmp_path: Path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = with_lora(base, LoraConfig(rank=4, alpha=32, target_modules=["q_proj", "down_proj"]))
    for value in adapted.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.1)
    trained = {name: value.detach().clone() for name, value in adapted.named_parameters() if value.requires_grad}
    save_checkpoint_model(str(model_folder), write_checkpoint(trained, tmp_path / "checkpoint"), tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    expected = merged_weights(adapted)
    untouched = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    changed = [name for name in expected if not torch.equal(saved[name], untouched[name])]
    assert len(changed) == 4
    for name, value in expected.items():
        assert torch.allclose(saved[name], value, atol=1e-6), name


def test_only_named_checkpoints_are_deleted(tmp_path: Path):
    for name in ("one", "two", "three"):
        write_checkpoint({"a": torch.zeros(1)}, tmp_path / "run" / "weights" / name)
    write_checkpoint({"a": torch.zeros(1)}, tmp_path / "run" / "sampler_weights" / "one")
    assert checkpoint_folder(tmp_path, "tinker://run/weights/a b") == tmp_path / "run" / "weights" / "a%20b"
    server = LocalTinkerServer(
        "http://127.0.0.1:1", folder=tmp_path, log=tmp_path / "log", process=cast(GuardedProcess, None)
    )
    server.delete_weights(["tinker://run/weights/one", "tinker://run/weights/three"])
    left = sorted(str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob("trained.safetensors"))
    assert left == ["run/sampler_weights/one", "run/weights/two"]

"""A Tinker service of the user's: its key, and its adapters as a model."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

from astuner.backbone.causal_lm import load_causal_lm
from astuner.backbone.lora import merged_weights, with_lora
from astuner.backbone.trinity.tinker_service import KEY_VARIABLE, save_merged, service_key
from astuner.config.rollout import LoraConfig
from astuner.errors import ConfigError, ModelError


def packed(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=".")
    return archive


def test_a_services_adapters_are_merged_into_the_model(model_folder: Path, tmp_path: Path) -> None:
    model = with_lora(load_causal_lm(str(model_folder), torch.float32), LoraConfig(rank=4))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    save_merged(str(model_folder), packed(tmp_path / "adapters", tmp_path / "a.tar.gz"), tmp_path / "whole")
    found = load_causal_lm(str(tmp_path / "whole"), torch.float32).state_dict()
    expected, start = merged_weights(model), load_causal_lm(str(model_folder), torch.float32).state_dict()
    torch.testing.assert_close(found, {name: expected[name] for name in found})
    assert not all(torch.equal(value, start[name]) for name, value in found.items())


def test_what_holds_no_adapters_is_an_error(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has 0 adapter_config\.json; expected one"):
        save_merged(str(model_folder), packed(tmp_path / "empty", tmp_path / "a.tar.gz"), tmp_path / "whole")
    (tmp_path / "b.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"the adapters in b\.tar\.gz cannot be put into "):
        save_merged(str(model_folder), tmp_path / "b.tar.gz", tmp_path / "whole")


def test_a_service_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "tml-mine")
    assert service_key() == "tml-mine"
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match="environment variable TINKER_API_KEY is not set; export"):
        service_key()

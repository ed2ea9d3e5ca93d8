"""The model of a Tinker server's checkpoint, and which checkpoints are kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from astuner.backbone.lora import merged_weights, with_lora
from astuner.backbone.trinity.checkpoint import Kept, TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.sides import TinkerSide
from astuner.backbone.trinity.tinker_model import checkpoint_folder, forget, save_model
from astuner.backbone.trinity.tinker_service import TinkerService
from astuner.config.rollout import LoraConfig


def saved(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "trained.safetensors")
    return folder


def test_all_weights_come_back_as_they_were_trained(model_folder: Path, tmp_path: Path):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    trained = {name: (value + 1).clone() for name, value in base.state_dict().items()}
    save_model(str(model_folder), saved(trained, tmp_path / "checkpoint"), tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(found[name], value) for name, value in trained.items())


def test_adapters_are_merged_in(model_folder: Path, tmp_path: Path):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = with_lora(base, LoraConfig(rank=4, alpha=32, target_modules=["q_proj", "down_proj"]))
    for value in adapted.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.1)
    trained = {name: value.detach().clone() for name, value in adapted.named_parameters() if value.requires_grad}
    save_model(str(model_folder), saved(trained, tmp_path / "checkpoint"), tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    wanted = merged_weights(adapted)
    untouched = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    changed = [name for name in wanted if not torch.equal(found[name], untouched[name])]
    assert len(changed) == 4
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_only_what_is_named_goes(tmp_path: Path):
    for name in ("one", "two", "three"):
        saved({"a": torch.zeros(1)}, tmp_path / "run" / "weights" / name)
    saved({"a": torch.zeros(1)}, tmp_path / "run" / "sampler_weights" / "one")
    assert checkpoint_folder(tmp_path, "tinker://run/weights/a b") == tmp_path / "run" / "weights" / "a%20b"
    forget(tmp_path, ["tinker://run/weights/one", "tinker://run/weights/three"])
    left = sorted(str(found.parent.relative_to(tmp_path)) for found in tmp_path.rglob("trained.safetensors"))
    assert left == ["run/sampler_weights/one", "run/weights/two"]


SIDE = TinkerSide(TinkerService("http://127.0.0.1:1", "tml-none"))


def test_trinity_goes_on_from_a_checkpoint(tmp_path: Path):
    checkpoints = TrinityCheckpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    for step in (1, 2, 3):
        keep = partial(SIDE.keep, f"tinker://run/weights/{step}")
        checkpoints.save(step, keep, lambda folder: folder.mkdir(), {"totals": step})
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.progress, newest.weights) == ({"totals": 3, "step": 3}, "tinker://run/weights/3")
    assert sorted(checkpoints.kept()) == ["tinker://run/weights/2", "tinker://run/weights/3"]
    state = TrinityState(tmp_path / "trinity", SIDE)
    state.restore(newest, 2)
    assert state.saved(6) == state.newest() == "tinker://run/weights/3"
    assert state.saved(4) is None
    state.clear()
    assert state.saved(6) is None


@pytest.mark.trinity
def test_trinity_reads_what_is_put_in_place_for_it(tmp_path: Path):
    from trinity.manager.state_manager import StateManager

    kept = Kept(tmp_path / "step_000003", {"step": 3}, "tinker://run/weights/3")
    TrinityState(tmp_path, SIDE).restore(kept, 2)
    folder = tmp_path / "astuner" / "run"
    manager = StateManager(str(folder), trainer_name="trainer", explorer_name="explorer")
    assert manager.load_trainer()["latest_iteration"] == 6
    assert manager.load_explorer()["latest_iteration"] == 3
    assert int((folder / "latest_checkpointed_iteration.txt").read_text()) == 6

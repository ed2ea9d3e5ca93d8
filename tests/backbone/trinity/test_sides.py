"""What a run keeps of its weights, and which side it is on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astuner.backbone.trinity.checkpoint import TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.session import on_gpus
from astuner.backbone.trinity.sides import VerlSide
from tests.backbone.trinity.plans import run_config

UPDATES = 2


def place(root: Path, number: int) -> Path:
    return root / "astuner" / "run" / f"global_step_{number}"


def verl_saves(root: Path, number: int) -> None:
    """As Trinity does: its mark comes first, and the tokenizer's folder last."""
    actor = place(root, number) / "actor"
    actor.mkdir(parents=True)
    (place(root, number) / ".full_checkpoint").touch()
    (actor / "model_world_size_1_rank_0.pt").write_text(f"weights of {number}")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text("{}")
    (root / "astuner" / "run" / "latest_checkpointed_iteration.txt").write_text(str(number))


def saved_model(folder: Path) -> None:
    folder.mkdir()


def test_verls_weights_outlive_what_trinity_keeps_of_a_run(tmp_path: Path):
    root, checkpoints = tmp_path / "trinity", TrinityCheckpoints(tmp_path / "checkpoints", 2)
    side = VerlSide()
    state = TrinityState(root, side)
    for step in (1, 2, 3):
        assert state.saved(step * UPDATES) is None
        verl_saves(root, step * UPDATES)
        weights = state.saved(step * UPDATES)
        assert weights == state.newest() == str(place(root, step * UPDATES) / "actor")
        checkpoints.save(step, lambda folder, weights=weights: side.keep(weights, folder), saved_model, {"seen": step})
    # Trinity's own are of use as long as its processes may look at them.
    assert [number for number in (2, 4, 6) if place(root, number).exists()] == [4, 6]

    state.clear()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.progress == {"step": 3, "seen": 3}
    state.restore(newest, UPDATES)
    restored = place(root, 6) / "actor" / "model_world_size_1_rank_0.pt"
    assert restored.read_text() == "weights of 6"
    restored.write_text("spoilt")  # as by a worker that is killed while it saves again
    assert (newest.folder / "actor" / restored.name).read_text() == "weights of 6"
    assert state.saved(6) == str(restored.parent)


@pytest.mark.parametrize(
    ("device", "gpus", "found"),
    [("cpu", 8, False), ("auto", 0, False), ("auto", 1, False), ("auto", 2, True), ("cuda", 1, True)],
)
def test_gpus_are_used_where_there_are_enough_for_both(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, found: bool
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert on_gpus(run_config(trainer_common__device=device).astuner) == found

"""Trinity's state and the run's checkpoints, with each training backend; and the choice of the training backend."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from astuner.backbone.trinity.backbone import on_gpus
from astuner.backbone.trinity.checkpoint import TrinityCheckpoint, TrinityCheckpoints, TrinityState
from astuner.backbone.trinity.tinker_service import RemoteTinkerService
from astuner.backbone.trinity.training_backends import VerlTrainingBackend
from astuner.errors import RecordError
from tests.backbone.trinity.plans import run_config

BACKEND = RemoteTinkerService("http://127.0.0.1:1", "tml-none")


def test_state_is_restored_from_a_checkpoint(tmp_path: Path):
    checkpoints = TrinityCheckpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest() is None
    for step in (1, 2, 3):
        store = partial(BACKEND.store_weights, f"tinker://run/weights/{step}")
        checkpoints.save(step, store, lambda folder: folder.mkdir(), {"totals": step})
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.progress, newest.weights) == ({"totals": 3, "step": 3}, "tinker://run/weights/3")
    assert sorted(checkpoints.stored_weights()) == ["tinker://run/weights/2", "tinker://run/weights/3"]
    state = TrinityState(tmp_path / "trinity", BACKEND)
    state.restore(newest, 2)
    assert state.saved_weights(6) == state.newest_weights() == "tinker://run/weights/3"
    assert state.saved_weights(4) is None
    state.clear()
    assert state.saved_weights(6) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"step": "x", "weights": "w"}', '{"step": 2}', "null"])
def test_damaged_progress_is_an_error_with_a_remedy(tmp_path: Path, content: str):
    checkpoints = TrinityCheckpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(2, lambda _: "w", lambda folder: folder.mkdir(), {})
    file = tmp_path / "checkpoints/step_000002/progress.json"
    (file.parent / "complete.json").unlink()  # its sizes would tell, and the folder would count as incomplete
    file.write_text(content or " ")
    with pytest.raises(RecordError, match=r"cannot be read.*remove that folder to resume from the one before"):
        checkpoints.newest()


def test_copies_of_checkpoints_keep_their_weights(tmp_path: Path):
    checkpoints = TrinityCheckpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, lambda _: "first", lambda folder: folder.mkdir(), {})
    shutil.copytree(tmp_path / "checkpoints/step_000001", tmp_path / "checkpoints/step_best")
    (tmp_path / "checkpoints/damaged").mkdir()
    (tmp_path / "checkpoints/damaged/progress.json").write_text("[")
    checkpoints.save(2, lambda _: "second", lambda folder: folder.mkdir(), {})
    assert sorted(checkpoints.stored_weights()) == ["first", "second"]


@pytest.mark.trinity
def test_trinity_reads_the_restored_state(tmp_path: Path):
    from trinity.manager.state_manager import StateManager

    checkpoint = TrinityCheckpoint(tmp_path / "step_000003", {"step": 3}, "tinker://run/weights/3")
    TrinityState(tmp_path, BACKEND).restore(checkpoint, 2)
    folder = tmp_path / "astuner" / "run"
    manager = StateManager(str(folder), trainer_name="trainer", explorer_name="explorer")
    assert manager.load_trainer()["latest_iteration"] == 6
    assert manager.load_explorer()["latest_iteration"] == 3
    assert int((folder / "latest_checkpointed_iteration.txt").read_text()) == 6


UPDATES = 2


def step_folder(root: Path, number: int) -> Path:
    return root / "astuner" / "run" / f"global_step_{number}"


def write_verl_checkpoint(root: Path, number: int) -> None:
    """Write a checkpoint as Trinity does: its marker first, the tokenizer's folder last."""
    actor = step_folder(root, number) / "actor"
    actor.mkdir(parents=True)
    (step_folder(root, number) / ".full_checkpoint").touch()
    (actor / "model_world_size_1_rank_0.pt").write_text(f"weights of {number}")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text("{}")
    (root / "astuner" / "run" / "latest_checkpointed_iteration.txt").write_text(str(number))


def saved_model(folder: Path) -> None:
    folder.mkdir()


def test_verl_weights_survive_the_removal_of_trinitys_state(tmp_path: Path):
    root, checkpoints = tmp_path / "trinity", TrinityCheckpoints(tmp_path / "checkpoints", 2)
    training_backend = VerlTrainingBackend()
    state = TrinityState(root, training_backend)
    for step in (1, 2, 3):
        assert state.saved_weights(step * UPDATES) is None
        write_verl_checkpoint(root, step * UPDATES)
        weights = state.saved_weights(step * UPDATES)
        assert weights == state.newest_weights() == str(step_folder(root, step * UPDATES) / "actor")
        checkpoints.save(
            step,
            lambda folder, weights=weights: training_backend.store_weights(weights, folder),
            saved_model,
            {"episodes": step},
        )
    # Trinity's processes may still read the previous step.
    assert [number for number in (2, 4, 6) if step_folder(root, number).exists()] == [4, 6]

    state.clear()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.progress == {"step": 3, "episodes": 3}
    state.restore(newest, UPDATES)
    restored = step_folder(root, 6) / "actor" / "model_world_size_1_rank_0.pt"
    assert restored.read_text() == "weights of 6"
    restored.write_text("corrupt")  # like a worker that is killed while saving
    assert (newest.folder / "actor" / restored.name).read_text() == "weights of 6"
    assert state.saved_weights(6) == str(restored.parent)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("cpu", 8, False), ("auto", 0, False), ("auto", 1, False), ("auto", 2, True), ("cuda", 1, True)],
)
def test_gpus_are_used_if_there_are_enough(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, expected: bool):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert on_gpus(run_config(trainer_common__device=device).astuner) == expected

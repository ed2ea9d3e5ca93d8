"""Which folders are checkpoints, and which one a run resumes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.backbone.training.checkpoints import CheckpointFolder, complete_checkpoints
from astuner.backbone.training.run_state import RunState
from astuner.errors import RecordError


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """A folder with the checkpoints of steps 2 and 4."""
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in (2, 4):
        write(folder, step)
    return folder


def write(checkpoints: CheckpointFolder, step: int) -> None:
    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text("w" * step)
        (folder / "trainer.pt").write_text(f"state of {step}")

    checkpoints.write(step, fill)


def names(checkpoints: CheckpointFolder) -> list[str]:
    return [path.name for path in complete_checkpoints(checkpoints.folder)]


COPIES = [
    "step_best", "step_000002.bak", "step_2 copy", "step_000002 copy", "step_-1", "step_-00001", "step_2",
    "step_0000009", "step_00009", "step_９９９９９９", "step_000009~", "step_", "STEP_000009", "step_000009",
    "step_1e5", "step_0x0009", "xstep_000009",
]  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_neither_read_nor_counted_nor_removed(checkpoints: CheckpointFolder, name: str) -> None:
    shutil.copytree(checkpoints.folder / "step_000002", checkpoints.folder / name)
    assert names(checkpoints) == ["step_000002", "step_000004"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step_000004"
    for step in (6, 8):
        write(checkpoints, step)
    assert names(checkpoints) == ["step_000006", "step_000008"]
    assert (checkpoints.folder / name / "trainer.pt").read_text() == "state of 2"
    assert {path.name for path in checkpoints.folder.iterdir()} == {"step_000006", "step_000008", name}


def test_links_are_not_checkpoints(checkpoints: CheckpointFolder, tmp_path: Path) -> None:
    shutil.copytree(checkpoints.folder / "step_000002", tmp_path / "step_000006")
    for target in (tmp_path / "step_000006", checkpoints.folder / "step_000002", tmp_path / "nowhere"):
        link = checkpoints.folder / "step_000006"
        link.symlink_to(target)
        assert names(checkpoints) == ["step_000002", "step_000004"]
        write(checkpoints, 6)
        assert names(checkpoints) == ["step_000004", "step_000006"]
        shutil.rmtree(checkpoints.folder)
        for step in (2, 4):
            write(checkpoints, step)
    assert (tmp_path / "step_000006" / "trainer.pt").exists()


def without_file(folder: Path) -> None:
    (folder / "model" / "weights").unlink()


def cut(folder: Path) -> None:
    (folder / "trainer.pt").write_text("st")


def without_marker_and_state(folder: Path) -> None:
    (folder / "complete.json").unlink()
    (folder / "trainer.pt").unlink()


def empty_state(folder: Path) -> None:
    (folder / "complete.json").unlink()
    (folder / "trainer.pt").write_text("")


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def damaged_marker(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "complete.json").write_text(content) and None


@pytest.mark.parametrize(
    "damage",
    [
        without_file, cut, without_marker_and_state, empty_state, replaced_by_a_file,
        *map(damaged_marker, (
            "", "{}", "[]", "null", '{"step": 4}', '{"step": 4, "files": []}', '{"step": 4, "files": {}}',
            '{"step": "4", "files": {"a": 1}}', '{"step": 4, "files": {"a": []}}', "[" * 99999,
        )),
    ],
)  # fmt: skip
def test_incomplete_checkpoints_are_left_out(checkpoints: CheckpointFolder, damage: Callable[[Path], None]) -> None:
    damage(checkpoints.folder / "step_000004")
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step_000002"
    write(checkpoints, 6)
    assert names(checkpoints) == ["step_000002", "step_000006"]


@pytest.mark.parametrize("damage", [without_file, cut])
def test_damaged_checkpoints_are_named(
    checkpoints: CheckpointFolder, log: list[str], damage: Callable[[Path], None]
) -> None:
    damage(checkpoints.folder / "step_000004")
    checkpoints.newest()
    (warning,) = log
    assert f"{checkpoints.folder / 'step_000004'} is damaged" in warning
    assert f"{checkpoints.folder / 'step_000002'} is used instead" in warning
    damage(checkpoints.folder / "step_000002")
    with pytest.raises(RecordError, match=r"step_000004 cannot be read \(its files differ from complete\.json\)"):
        checkpoints.newest()


@pytest.mark.parametrize("state", ["trainer.pt", "progress.json"])
def test_checkpoints_of_earlier_versions_are_read(checkpoints: CheckpointFolder, state: str) -> None:
    for folder in complete_checkpoints(checkpoints.folder):
        (folder / "complete.json").unlink()
        (folder / "trainer.pt").rename(folder / state)
    assert names(checkpoints) == ["step_000002", "step_000004"]


def test_long_step_numbers_are_in_order(checkpoints: CheckpointFolder) -> None:
    for step in (999_999, 1_000_000):
        write(checkpoints, step)
    assert names(checkpoints) == ["step_999999", "step_1000000"]


def test_the_remains_of_a_kill_are_repaired(checkpoints: CheckpointFolder) -> None:
    folder = checkpoints.folder
    # Killed between the two renames of a checkpoint that replaces another one of its step.
    (folder / "step_000004").rename(folder / ".earlier_step_000004")
    (folder / ".partial_step_000004").mkdir()
    (folder / "step_000002").rename(folder / ".removed_step_000002")
    assert [path.name for path in complete_checkpoints(folder)] == [".earlier_step_000004"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.name == "step_000004"
    assert [path.name for path in folder.iterdir()] == ["step_000004"]


def test_a_kill_before_the_removal_of_the_oldest_checkpoint_keeps_it_until_the_newest_is_read(
    checkpoints: CheckpointFolder,
) -> None:
    kept = CheckpointFolder(checkpoints.folder, keep=1)
    assert kept.newest() == checkpoints.folder / "step_000004"
    assert names(kept) == ["step_000002", "step_000004"]  # to fall back to if the newest one cannot be read
    kept.remove_old()
    assert names(kept) == ["step_000004"]


STATE = json.loads(json.dumps(RunState(step=3, seconds_before=2.0).dump(0.0)))


@pytest.mark.parametrize(
    "damage",
    [
        {}, {"step": None}, {"step": "x"}, {"step": -1}, {"step": 1.5}, {"totals": []}, {"totals": {"tokens": 1}},
        {"validated": "x"}, {"validated": -4}, {"before": {"x": 1}}, {"latest": []}, {"first_reward_seconds": "soon"},
        {"seconds_before": float("nan")}, {"steps_without_signal": "x"},
    ],
)  # fmt: skip
def test_damaged_progress_is_an_error_with_a_remedy(damage: dict[str, object]) -> None:
    with pytest.raises(RecordError, match=r"progress in the checkpoint is damaged.*resume from the one before"):
        RunState.load({**STATE, **damage} if damage else {})


def test_progress_of_other_versions_is_read() -> None:
    earlier = {name: value for name, value in STATE.items() if name != "steps_without_signal"}
    state = RunState.load({**earlier, "of a later version": 1, "seconds_before": -5.0, "first_reward_seconds": -1.0})
    assert (state.step, state.seconds_before, state.first_reward_seconds) == (3, 0.0, 0.0)

"""Whole runs that fail, are killed, are resumed with changed keys, or see the clock set back: nothing is lost."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.analysis.explain.command import explain
from astuner.errors import BackboneError, RecordError
from astuner.launcher.resume import can_resume
from astuner.run_record import read_index, read_metrics, read_summary
from astuner.viewer.export import export_run
from campaigns.serial_run import Runs, compare, write_job

MakeJob = Callable[..., AstunerJob]


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "reinforce++"])
def test_a_step_whose_rewards_are_extreme_is_recorded_and_explained(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
):
    job = make_job("ExtremeRewards", algorithm=algorithm, rollout__num_repeat=2)
    with pytest.raises(
        BackboneError, match=r"rewards of 4 episodes are extreme: train-000002-.*reward -?1e\+308"
    ) as info:
        job.tune(tmp_path / "records")
    assert "Scale or clip the rewards" in str(info.value)
    assert "optim.lr" not in str(info.value)
    record = tmp_path / "records/run"
    entries = [entry for entry in read_index(record) if entry.step == 2]
    assert len(entries) == 4
    assert sorted(entry.reward for entry in entries if entry.reward)[::3] == [-1e308, 1e308]
    assert all(entry.lacks_advantage for entry in entries)
    explain("run", None, tmp_path / "records")
    assert "4 of them without an advantage: the update of the step" in " ".join(capsys.readouterr().out.split())
    explain("run", entries[0].episode_id, tmp_path / "records")
    assert "without an advantage" in " ".join(capsys.readouterr().out.split())
    for kind in ("jsonl", "parquet"):
        told: list[str] = []
        export_run("run", tmp_path / "records", kind, tmp_path / f"out.{kind}", None, told.append)  # type: ignore[arg-type]
        assert told[0].startswith("4 training episodes are without an advantage")


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_is_set_changes_no_duration(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
):
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr("time.time", lambda: real() + jump * next(calls))
    tuned = make_job(trainer_common__val_before_train=True).tune(tmp_path / "records")
    assert 0 < tuned.metrics.seconds < 600
    assert 0 < read_summary(tuned.record).seconds < 600
    for entry in read_index(tuned.record):
        assert 0 <= entry.seconds < 600
    for row in read_metrics(tuned.record):
        for name, value in row.metrics.items():
            assert not name.startswith("time/") or (value is not None and 0 <= value < 600), name


def test_a_deleted_record_ends_the_run_at_its_next_write(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RECORD_TO_REMOVE", str(tmp_path / "records/run"))
    job = make_job("RemovesTheRecord", trainer_common__total_training_steps=50)
    with pytest.raises(RecordError, match=r"run/.*\.jsonl was deleted, moved or replaced while the run was writing"):
        job.tune(tmp_path / "records")
    assert not (tmp_path / "records/run").exists()


@pytest.fixture(scope="module")
def serial(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path]:
    """Runs of one configuration, and the record of an uninterrupted one."""
    folder = tmp_path_factory.mktemp("serial")
    runs = Runs(write_job(folder, model_folder))
    runs.complete(folder / "whole")
    return runs, folder / "whole/run"


def metrics_of(record: Path) -> str:
    try:
        return (record / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return ""


# Moments at which a run is killed, as conditions on its record.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "in an update": lambda record: (
        (record / "episodes/pending.jsonl").exists() and (record / "checkpoints/step_000002").exists()
    ),
    "in the second checkpoint": lambda record: (record / "checkpoints/.partial_step_000004").exists(),
    "in the final validation": lambda record: (
        (record / "checkpoints/step_000004").exists() and (record / "episodes/val/step_000004").exists()
    ),
    "after the final validation": lambda record: '{"step":4,' in metrics_of(record).rpartition('"val/')[0][-99999:],
    "with the model": lambda record: (record / "model").exists() or (record / "plots").exists(),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_several_times_has_every_row_once(serial: tuple[Runs, Path], tmp_path: Path, moment: str):
    runs, whole = serial
    record = tmp_path / "run"

    def kill() -> bool:
        return runs.kill_at(tmp_path, lambda: MOMENTS[moment](record))

    assert kill() or kill() or kill()  # on a busy machine, a moment may pass unseen
    kill()
    runs.complete(tmp_path)
    comparison = compare(whole, record)
    assert comparison.is_equal, comparison


def test_a_run_killed_before_it_removed_an_old_checkpoint_removes_it(serial: tuple[Runs, Path], tmp_path: Path):
    runs, whole = serial
    in_validation, keep_two = MOMENTS["in the final validation"], "astuner.trainer_common.max_checkpoints_to_keep=2"
    assert runs.kill_at(tmp_path, lambda: in_validation(tmp_path / "run"), keep_two)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 2
    runs.complete(tmp_path)
    comparison = compare(whole, tmp_path / "run")
    assert comparison.is_equal, comparison


@pytest.fixture(scope="module")
def killed_run(serial: tuple[Runs, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run that was killed after its first checkpoint."""
    runs, _ = serial
    folder = tmp_path_factory.mktemp("killed")
    checkpoint = folder / "run/checkpoints/step_000002"
    assert runs.kill_at(folder, checkpoint.exists)
    return folder / "run"


@pytest.fixture
def killed(killed_run: Path, tmp_path: Path) -> Path:
    """A copy of that record, in `tmp_path`."""
    return shutil.copytree(killed_run, tmp_path / "run")


def test_a_killed_run_goes_on_elsewhere_with_other_free_keys(serial: tuple[Runs, Path], killed: Path, tmp_path: Path):
    runs, whole = serial
    moved = tmp_path / "moved"
    for name in ("step_best", "step_000002.bak", "step_000009"):
        shutil.copytree(killed / "checkpoints/step_000002", killed / "checkpoints" / name)
    moved.mkdir()
    killed.rename(moved / "run")
    runs.complete(
        moved, "--exp-dir=.", "astuner.trainer_common.logger=[tensorboard]", "astuner.trainer_common.save_freq=1",
        "astuner.trainer_common.max_checkpoints_to_keep=9", "astuner.deadlines.update=1000",
    )  # fmt: skip
    assert not (moved / "run.1").exists()
    assert "resuming from the checkpoint of step 2" in (moved / "output.log").read_text()
    comparison = compare(whole, moved / "run")
    assert {name for _, _, name in comparison.extra} == {"step_000002", "step_000003", "step_best", "step_000009",
                                                        "step_000002.bak"}  # fmt: skip
    assert [comparison.lost, comparison.doubled, comparison.different, comparison.leftovers] == [[]] * 4


@pytest.mark.parametrize(
    ("steps", "moment", "extra"),
    [(4, "in the second checkpoint", {"step_000002"}), (2, "with the model", {"step_000002", "step_000003"})],
)
def test_a_run_killed_while_it_writes_goes_on_with_other_free_keys(
    serial: tuple[Runs, Path], tmp_path: Path, steps: int, moment: str, extra: set[str]
):
    runs, whole = serial
    first, moved = tmp_path / "first", tmp_path / "moved"
    total = f"astuner.trainer_common.total_training_steps={steps}"
    assert runs.kill_at(first, lambda: MOMENTS[moment](first / "run"), total)
    moved.mkdir()
    (first / "run").rename(moved / "run")
    runs.complete(
        moved, "--exp-dir=.", "astuner.trainer_common.logger=[console,tensorboard]",
        "astuner.trainer_common.max_checkpoints_to_keep=9",
        *["astuner.trainer_common.save_freq=1"] * (steps == 2),
    )  # fmt: skip
    assert not (moved / "run.1").exists()
    comparison = compare(whole, moved / "run")
    assert {name for _, _, name in comparison.extra} == extra
    assert [comparison.lost, comparison.doubled, comparison.different, comparison.leftovers] == [[]] * 4
    assert read_summary(moved / "run").steps == 4


def test_a_finished_run_goes_on_with_more_steps(serial: tuple[Runs, Path], model_folder: Path, tmp_path: Path):
    runs, whole = serial
    runs.complete(tmp_path, "astuner.trainer_common.total_training_steps=2")
    runs.complete(tmp_path)
    assert not (tmp_path / "run.1").exists()
    comparison = compare(whole, tmp_path / "run")
    assert comparison.is_equal, comparison
    assert read_summary(tmp_path / "run").steps == 4


def test_another_configuration_is_named_key_by_key(serial: tuple[Runs, Path], killed: Path, tmp_path: Path):
    runs, _ = serial
    runs.complete(tmp_path, "astuner.trainer_common.optim.lr=0.5", "astuner.trainer_common.total_training_steps=1")
    output = (tmp_path / "output.log").read_text()
    assert "astuner.trainer_common.optim.lr: 0.01 → 0.5" in output
    assert "astuner.trainer_common.total_training_steps: 4 → 1 (it may only become larger)" in output
    assert "restore these values" in output
    assert (tmp_path / "run.1/checkpoints/step_000002").exists()
    assert read_summary(tmp_path / "run").steps == 1


def damage(record: Path, line: bytes) -> None:
    for name in ("metrics.jsonl", "episodes/index.jsonl"):
        lines = (record / name).read_bytes().splitlines(keepends=True)
        (record / name).write_bytes(b"".join([lines[0], line + b"\n", *lines[1:]]))


def test_damaged_rows_do_not_keep_a_run_from_resuming(serial: tuple[Runs, Path], killed: Path, tmp_path: Path):
    runs, whole = serial
    for line in (b"{}", b'{"step":"x"}', b"\xff"):
        damage(killed, line)
    runs.complete(tmp_path)
    comparison = compare(whole, tmp_path / "run")
    assert set(comparison.leftovers) == {"metrics.jsonl.damaged", "episodes/index.jsonl.damaged"}
    comparison.leftovers.clear()
    assert comparison.is_equal, comparison


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_half_written_rows_at_the_end_of_all_files(
    serial: tuple[Runs, Path], killed: Path, tmp_path: Path, share: float
):
    """A share of 1 is a whole row without the end of its line, and for TensorBoard a whole record without its end."""
    runs, whole = serial
    names = ["metrics.jsonl", "diagnostics.jsonl", "episodes/index.jsonl", "episodes/pending.jsonl"]
    found = {name: next((run / name for run in (whole, killed) if (run / name).exists()), None) for name in names}
    for name, source in found.items():
        row = b'{"step": 3, "split": "train"}' if source is None else source.read_bytes().splitlines()[-1]
        with (killed / name).open("ab") as file:
            file.write(row[: round(share * len(row))])
    (events,) = (killed / "tensorboard").glob("events*")
    content = b"".join(path.read_bytes() for path in sorted((whole / "tensorboard").glob("events*")))
    with events.open("ab") as file:
        file.write(content[: round(share * 50)])
    step = killed / "episodes/train/step_000003"
    step.mkdir(exist_ok=True)
    for episode in (whole / "episodes/train/step_000003").glob("*.json"):
        (step / f".{episode.name}.1-2.tmp").write_bytes(episode.read_bytes()[: round(share * 999)])
    runs.complete(tmp_path)
    comparison = compare(whole, tmp_path / "run")
    assert comparison.is_equal, comparison


def test_a_damaged_configuration_is_not_a_configuration(
    serial: tuple[Runs, Path], killed: Path, tmp_path: Path, log: list[str]
):
    runs, _ = serial
    config = (killed / "config.yaml").read_text()
    assert can_resume(killed, config, tmp_path)
    for content in (b"", b"\xff\xfe", b"[]", b"{"):
        (killed / "config.yaml").write_bytes(content)
        log.clear()
        assert not can_resume(killed, config, tmp_path)
        assert "config.yaml is missing or damaged" in log[0]
    runs.complete(tmp_path, "astuner.trainer_common.total_training_steps=1")
    assert "config.yaml is missing or damaged" in (tmp_path / "output.log").read_text()
    assert (tmp_path / "run.1/checkpoints/step_000002").exists()


def test_the_summary_says_when_the_record_of_an_older_version_is_resumed(
    serial: tuple[Runs, Path], killed: Path, tmp_path: Path
):
    runs, whole = serial
    (killed / "checkpoints/step_000002/complete.json").unlink()
    config = killed / "config.yaml"
    config.write_text(config.read_text().replace("    save_freq: 2\n", ""))
    runs.complete(tmp_path)
    assert not (tmp_path / "run.1").exists()
    summary: dict[str, Any] = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 4
    comparison = compare(whole, tmp_path / "run")
    assert [comparison.lost, comparison.doubled, comparison.different, comparison.extra] == [[]] * 4

"""The thread that writes training steps: order, errors, and kills."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from astuner.errors import RecordError
from astuner.run_record import read_index, read_metrics, read_recorded_episode
from astuner.run_record.record import RunRecord, StepWriter
from astuner.schema import Episode, Task, TokenCounts


def episodes(step: int, count: int = 3) -> list[tuple[Episode, TokenCounts]]:
    task = Task(task_id="t", main_query="q")
    return [
        (
            Episode(
                episode_id=f"train-{step}-{number}", task=task, repeat_index=number, status="ok", reward=1.0,
                is_success=True, start_time=1.0, end_time=2.0,
            ),
            TokenCounts(),
        )
        for number in range(count)
    ]  # fmt: skip


def end_step(writer: StepWriter, step: int) -> None:
    writer.end_step(step, {"reward/mean": float(step)}, {each.episode_id: 0.5 for each, _ in episodes(step)}, {})


def opened(folder: Path, *, resume: bool = False) -> RunRecord:
    return RunRecord.open(folder, backbone="local", config_yaml="astuner: {}\n", resume=resume, loggers=[])


def train(folder: Path) -> None:
    """Write steps until the process is killed, as soon as the record says that step 3 is done."""
    import os
    import signal

    def end_if_done(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with opened(folder) as record, StepWriter(record) as writer:
        for step in range(1, 7):
            writer.begin_step(step, episodes(step))
            end_step(writer, step)
            writer.when_written(lambda step=step: end_if_done(step))  # type: ignore[misc]


def test_kill_loses_nothing_of_a_step_that_is_said_to_be_done(tmp_path: Path):
    folder = tmp_path / "run"
    code = "from pathlib import Path; import sys; from tests.run_record.test_step_writer import train; "
    code += "train(Path(sys.argv[1]))"
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=root, check=False, timeout=300)
    assert process.returncode == -9
    done = [entry for entry in read_index(folder) if entry.step <= 3]
    assert [(entry.step, entry.repeat_index, entry.advantage) for entry in done] == [
        (step, number, 0.5) for step in (1, 2, 3) for number in range(3)
    ]
    assert [row.metrics for row in read_metrics(folder) if row.step <= 3] == [
        {"reward/mean": float(step)} for step in (1, 2, 3)
    ]
    for entry in done:
        recorded = read_recorded_episode(folder / entry.path)
        assert (recorded.episode.episode_id, recorded.labels.advantage) == (entry.episode_id, 0.5)
    # A resumed run keeps the steps of its checkpoint and repeats the others.
    with opened(folder, resume=True) as record:
        record.truncate_after(2)
        with StepWriter(record) as writer:
            writer.begin_step(3, episodes(3))
            end_step(writer, 3)
    assert [(entry.step, entry.repeat_index) for entry in read_index(folder)] == [
        (step, number) for step in (1, 2, 3) for number in range(3)
    ]
    assert [row.step for row in read_metrics(folder)] == [1, 2, 3]


def test_loop_goes_on_while_the_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_write, writing = threading.Event(), threading.Event()
    begin_step = RunRecord.begin_step

    def slow(record: RunRecord, step: int, each: list[tuple[Episode, TokenCounts]]) -> None:
        writing.set()
        assert may_write.wait(60)
        begin_step(record, step, each)

    monkeypatch.setattr(RunRecord, "begin_step", slow)
    said: list[int] = []
    with opened(tmp_path / "run") as record, StepWriter(record) as writer:
        writer.begin_step(1, episodes(1))
        assert writing.wait(60)
        end_step(writer, 1)
        writer.when_written(lambda: said.append(len(read_metrics(tmp_path / "run"))))
        assert read_index(tmp_path / "run") == []
        assert said == []
        may_write.set()
        writer.flush()
        assert said == [1]
        assert len(read_index(tmp_path / "run")) == 3
        assert writer.seconds_waited() > 0
        assert writer.seconds_waited() == 0


def test_error_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RecordError("the disk is full")

    said: list[int] = []

    def write() -> None:
        with StepWriter(record) as writer:
            writer.begin_step(1, episodes(1))
            end_step(writer, 1)
            writer.when_written(lambda: said.append(1))
            writer.flush()

    def fail_in_loop(writer: StepWriter) -> None:
        writer.begin_step(2, episodes(2))
        raise ValueError("other")

    with opened(tmp_path / "run") as record:
        monkeypatch.setattr(record, "end_step", fail)
        with pytest.raises(RecordError, match="the disk is full"):
            write()
        monkeypatch.setattr(record, "begin_step", fail)
        with pytest.raises(ValueError, match="other"), StepWriter(record) as writer:  # is not replaced
            fail_in_loop(writer)
    assert said == []
    assert len(read_index(tmp_path / "run")) == 3

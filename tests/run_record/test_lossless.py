"""No row of a record is lost or doubled: pending steps, resumes, damaged lines, and a record that disappears."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import RecordError
from astuner.run_record import read_index, read_metrics, read_recorded_episode
from astuner.run_record.record import RunRecord
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, TokenCounts

MakeEpisode = Callable[..., Episode]
TOKENS = TokenCounts(3, 2, 1)
UPDATE = SampleUpdate(((10, 0.5),), (-0.5,) * 10)


def open_record(folder: Path, *, resume: bool = False, loggers: Any = ()) -> RunRecord:
    return RunRecord.open(folder, backbone="local", config_yaml="", resume=resume, loggers=loggers)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episodes/index.jsonl").read_text().splitlines()]


def keys_of(folder: Path) -> list[tuple[str, int, str]]:
    return [(row["split"], row["step"], row["episode_id"]) for row in lines_of(folder)]


def test_episodes_are_readable_before_the_update_and_get_its_results(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "exp"
    with open_record(folder) as record:
        record.begin_step(1, [(make_episode(name), TOKENS) for name in ("a", "b")])
        assert [(entry.episode_id, entry.advantage) for entry in read_index(folder)] == [("a", None), ("b", None)]
        assert not keys_of(folder)
        recorded = read_recorded_episode(folder / read_index(folder)[0].path)
        assert (recorded.labels.advantage, recorded.updates) == (None, ())
        record.end_step({"a": 0.5}, {"a": (UPDATE,)})
        assert keys_of(folder) == [("train", 1, "a"), ("train", 1, "b")]
    entries = {entry.episode_id: entry for entry in read_index(folder)}
    assert (entries["a"].advantage, entries["b"].advantage) == (0.5, None)
    recorded = read_recorded_episode(folder / entries["a"].path)
    assert recorded.labels.advantage == 0.5
    assert recorded.updates[0].advantages == UPDATE.advantages
    assert recorded.episode == make_episode("a")
    assert {path.name for path in (folder / "episodes").iterdir()} == {"index.jsonl", "train"}


def test_files_written_in_two_parts_equal_those_written_at_once(tmp_path: Path, make_episode: MakeEpisode) -> None:
    for advantage in (0.5, float("nan"), None):
        with open_record(tmp_path / "two") as two, open_record(tmp_path / "one") as one:
            two.begin_step(1, [(make_episode(), TOKENS)])
            two.end_step({} if advantage is None else {"e1": advantage}, {"e1": (UPDATE,)})
            one.write_episode(1, "train", make_episode(), advantage, TOKENS, (UPDATE,))
        entry = read_index(tmp_path / "one")[0]
        assert (tmp_path / "one" / entry.path).read_bytes() == (tmp_path / "two" / entry.path).read_bytes()
        assert lines_of(tmp_path / "one") == lines_of(tmp_path / "two")


def test_a_step_whose_update_fails_stays_in_the_index(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "exp"
    with open_record(folder) as record:
        record.begin_step(1, [(make_episode("a"), TOKENS)])
    assert keys_of(folder) == [("train", 1, "a")]
    assert lines_of(folder)[0]["advantage"] is None
    assert not (folder / "episodes/pending.jsonl").exists()


def test_a_secret_stays_out_of_files_that_are_written_in_two_parts(
    tmp_path: Path, make_episode: MakeEpisode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sesame-4711-opens")
    with open_record(tmp_path / "exp") as record:
        record.begin_step(1, [(make_episode("a", error="sesame-4711-opens"), TOKENS)])
        record.end_step({"a": 0.5}, {"a": (UPDATE,)})
    recorded = read_recorded_episode(tmp_path / "exp" / read_index(tmp_path / "exp")[0].path)
    assert (recorded.labels.advantage, recorded.updates, recorded.withheld is None) == (0.5, (), False)


@pytest.mark.parametrize("validated", [-1, 0, 2])
def test_validations_after_the_checkpoint_are_removed(
    tmp_path: Path, make_episode: MakeEpisode, tensorboard_events: Callable[[Path], dict[str, Any]], validated: int
) -> None:
    folder = tmp_path / "exp"
    with open_record(folder, loggers=("tensorboard",)) as record:
        for step in (0, 1, 2, 3):
            if step:
                record.begin_step(step, [(make_episode(f"train-{step}"), TOKENS)])
                record.end_step({}, {})
                record.log_metrics(step, {"reward/mean": step})
            record.write_episode(step, "val", make_episode(f"val-{step}"))
            record.log_metrics(step, {"val/reward": step, "time/validation": 1.0})
    for _ in range(2):  # the second time as after another kill
        with open_record(folder, resume=True, loggers=("tensorboard",)) as record:
            record.truncate_after(2, validated)
    kept = [step for step in (0, 1, 2) if step <= validated]
    expected = {("train", step, f"train-{step}") for step in (1, 2)} | {("val", step, f"val-{step}") for step in kept}
    assert set(keys_of(folder)) == expected
    assert len(keys_of(folder)) == len(expected)
    files = {path.parent.parent.name + path.parent.name for path in (folder / "episodes").glob("*/*/*.json")}
    assert files == {f"{split}step_{step:06d}" for split, step, _ in expected}
    assert sorted(row.step for row in read_metrics(folder) if row.is_validation) == kept
    assert [row.step for row in read_metrics(folder) if not row.is_validation] == [1, 2]
    events = tensorboard_events(folder)
    assert [step for step, _ in events["reward/mean"]] == [1, 2]
    assert [step for step, _ in events.get("val/reward", [])] == kept
    assert len(list((folder / "tensorboard").iterdir())) == 1


def test_tensorboard_after_a_kill_between_two_files_and_with_the_clock_set_back(
    tmp_path: Path, tensorboard_events: Callable[[Path], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exp"
    with open_record(folder, loggers=("tensorboard",)) as record:
        for step in (1, 2, 3):
            record.log_metrics(step, {"reward/mean": step})
    earlier = {path: path.read_bytes() for path in (folder / "tensorboard").iterdir()}
    monkeypatch.setattr("time.time", lambda: 1e9)
    with open_record(folder, resume=True, loggers=("tensorboard",)) as record:
        record.truncate_after(2)
        for path, content in earlier.items():
            path.write_bytes(content)  # as if the process had been killed before it removed this file
        record.log_metrics(3, {"reward/mean": 30})
    assert tensorboard_events(folder)["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


DAMAGED = [
    b"{}",
    b'{"step":"x"}',
    b'{"step":null,"time":1,"metrics":{}}',
    b'{"step":-1,"time":1,"metrics":{},"split":"train","episode_id":"e","path":"p"}',
    b'{"step":1.5,"time":1,"metrics":{"a":1}}',
    b'{"step":true,"time":1,"metrics":{"a":1}}',
    b'{"step":1,"time":"now","metrics":{"a":1}}',
    b'{"step":1,"time":1,"metrics":[]}',
    b'{"step":1,"time":1,"metrics":{"a":"b"}}',
    b'{"step":1,"time":NaN,"metrics":{"a":1}}',
    b'{"step":1e999,"time":1,"metrics":{"a":1}}',
    b"[]",
    b"null",
    b"7",
    b"",
    b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}",
    b'{"step":1,"time":1,"met',
    b"[" * 100_000,
    b'{"step":' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:40].decode(errors="replace"))
def test_damaged_lines_neither_end_a_resume_nor_stay(tmp_path: Path, make_episode: MakeEpisode, line: bytes) -> None:
    folder = tmp_path / "exp"
    with open_record(folder) as record:
        for step in (1, 2, 3):
            record.write_episode(step, "train", make_episode(f"e{step}"), 0.5, TOKENS)
            record.log_metrics(step, {"reward/mean": step})
    for name in ("metrics.jsonl", "episodes/index.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join([lines[0], line, b"\n", *lines[1:], lines[1]]))
    for read in (read_index, read_metrics):
        found: list[RecordError] = []
        with pytest.raises(RecordError, match="line 2"):
            read(folder)
        assert len(read(folder, found.append)) >= 3
        assert len(found) == 1
    with open_record(folder, resume=True) as record:
        record.truncate_after(2)
    assert keys_of(folder) == [("train", 1, "e1"), ("train", 2, "e2")]
    assert [row.step for row in read_metrics(folder)] == [1, 2]
    assert line in (folder / "metrics.jsonl.damaged").read_bytes()
    assert "removed 1 invalid lines" in (folder / "run.log").read_text()


def test_a_damaged_line_of_an_episode_is_restored_from_its_file(tmp_path: Path, make_episode: MakeEpisode) -> None:
    folder = tmp_path / "exp"
    with open_record(folder) as record:
        for step in (1, 2):
            record.write_episode(step, "train", make_episode(f"e{step}"), 0.5, TOKENS)
    before = lines_of(folder)
    lines = (folder / "episodes/index.jsonl").read_text().splitlines(keepends=True)
    (folder / "episodes/index.jsonl").write_text("{}\n" + lines[1])
    with open_record(folder, resume=True) as record:
        record.truncate_after(2)
    assert sorted(lines_of(folder), key=lambda row: row["step"]) == before


def unlink(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace_files(folder: Path) -> None:
    for name in ("metrics.jsonl", "episodes/index.jsonl"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content)


def shorten(folder: Path) -> None:
    for name in ("metrics.jsonl", "episodes/index.jsonl"):
        os.truncate(folder / name, 0)


@pytest.mark.parametrize("vanish", [unlink, move, replace_files, shorten])
@pytest.mark.parametrize("write", ["metrics", "episode", "begin_step", "end_step"])
def test_a_record_that_disappears_is_noticed_at_the_next_write(
    tmp_path: Path, make_episode: MakeEpisode, vanish: Callable[[Path], None], write: str
) -> None:
    folder = tmp_path / "exp"
    with open_record(folder, loggers=("tensorboard",)) as record:
        record.log_metrics(1, {"reward/mean": 1})
        record.write_episode(1, "train", make_episode())
        if write == "end_step":
            record.begin_step(2, [(make_episode("a"), TOKENS)])
        vanish(folder)
        writes: dict[str, Callable[[], object]] = {
            "metrics": lambda: record.log_metrics(2, {"reward/mean": 1}),
            "episode": lambda: record.write_episode(2, "train", make_episode("b")),
            "begin_step": lambda: record.begin_step(2, [(make_episode("b"), TOKENS)]),
            "end_step": lambda: record.end_step({"a": 1.0}, {}),
        }
        with pytest.raises(RecordError, match=r"exp/.*\.jsonl was .* while the run was writing to it.*run the same"):
            writes[write]()
    if vanish in (unlink, move):
        assert not folder.exists()

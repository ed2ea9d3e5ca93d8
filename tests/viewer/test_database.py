"""The index's database: shared with other viewers, damaged, or not available."""

from __future__ import annotations

import os
import resource
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.task_rollout.statistics import tokens_of
from astuner.viewer import database
from astuner.viewer.index import RunIndex
from tests.viewer.records import Agents, an_episode, open_record


def episodes(index: RunIndex) -> int:
    with index.reading() as db:
        return int(db.execute("select count(*) from episodes").fetchone()[0])


def test_viewers_of_two_versions_have_separate_indexes(runs: Path, tmp_path: Path, monkeypatch: Any):
    older = RunIndex(runs / "first", tmp_path)
    assert episodes(older) == 18
    monkeypatch.setattr(database, "_VERSION", database._VERSION + 1)
    newer = RunIndex(runs / "first", tmp_path)
    assert episodes(newer) == episodes(older) == 18
    # As an open page does after another run was shown in between.
    again = RunIndex(runs / "first", tmp_path)
    assert episodes(again) == 18
    assert len(list(tmp_path.glob("*.sqlite3"))) == 2
    for index in (older, newer, again):
        index.close()


def test_an_index_that_cannot_be_opened_is_not_removed(runs: Path, tmp_path: Path):
    index = RunIndex(runs / "first", tmp_path)
    assert episodes(index) == 18
    (file,) = tmp_path.glob("*.sqlite3")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # All lower file descriptors are in use.
    free = os.open("/", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        second = database.open_database(runs / "first", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(free)
    assert second.execute("select count(*) from episodes").fetchone()[0] == 0
    second.close()
    assert file.exists()
    assert episodes(index) == 18
    index.close()


@pytest.mark.parametrize("what", ["the file", "its journals"])
def test_a_damaged_index_is_rebuilt(runs: Path, tmp_path: Path, what: str):
    index = RunIndex(runs / "first", tmp_path)
    assert episodes(index) == 18
    (file,) = tmp_path.glob("*.sqlite3")
    journals = [file.with_name(file.name + suffix) for suffix in ("-wal", "-shm")]
    contents = {path: path.read_bytes() for path in journals}
    index.close()
    file.write_bytes(b"no database " * 1000)
    if what != "the file":
        for path, content in contents.items():
            path.write_bytes(content)
    index = RunIndex(runs / "first", tmp_path)
    assert episodes(index) == 18
    index.close()
    assert file.read_bytes().startswith(b"SQLite format 3")


def test_the_first_error_of_a_transaction_is_raised(runs: Path, tmp_path: Path):
    index = RunIndex(runs / "first", tmp_path)
    with index.reading() as db:
        db.execute("create trigger full before insert on positions begin select raise(rollback, 'disk full'); end")
        db.execute("delete from positions")
    with pytest.raises(sqlite3.DatabaseError, match="disk full"):
        episodes(index)
    index.close()


def advantages_of(index: RunIndex) -> dict[str, float | None]:
    with index.reading() as db:
        rows = list(db.execute("select episode, advantage from episodes"))
    assert len({row["episode"] for row in rows}) == len(rows)
    return {row["episode"]: row["advantage"] for row in rows}


def test_episodes_of_a_running_update_are_listed_once(agents: Agents, tmp_path: Path):
    first, second = (
        an_episode(name, "t", 0, agents.solve(name, "?", "3", forks=False), reward=1.0) for name in ("a", "b")
    )
    index, other = RunIndex(tmp_path / "run", tmp_path / "cache"), RunIndex(tmp_path / "run", tmp_path / "cache")
    with open_record(tmp_path / "run") as record:
        record.begin_step(1, [(first, tokens_of([first])), (second, tokens_of([second]))])
        assert advantages_of(index) == advantages_of(other) == {"a": None, "b": None}
        record.end_step({"a": 0.5, "b": -0.5}, {})
        assert advantages_of(index) == {"a": 0.5, "b": -0.5}
        record.begin_step(2, [(replace(first, episode_id="c"), tokens_of([first]))])
        assert advantages_of(other) == {"a": 0.5, "b": -0.5, "c": None}
        record.truncate_after(1)  # as a resumed run does
        assert advantages_of(other) == advantages_of(index) == {"a": 0.5, "b": -0.5}
        (tmp_path / "run/episodes/pending.jsonl").write_text('{}\n[]\n{"step": 1, "path": 5}\n')
        assert advantages_of(index) == {"a": 0.5, "b": -0.5}
    for each in (index, other):
        each.close()

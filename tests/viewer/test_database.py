"""The index's database: shared with other viewers, damaged, or not available."""

from __future__ import annotations

import os
import resource
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from astuner.viewer import database
from astuner.viewer.index import RunIndex


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

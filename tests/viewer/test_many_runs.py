"""A folder whose runs appear, change and disappear while the page is open."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from astuner.viewer.runs import IndexCache, Runs
from tests.viewer.conftest import client
from tests.viewer.records import Agents, open_record, write_step


def open_files(under: Path) -> int:
    """Return the number of files in a folder that this process has open."""
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(str(under.resolve())) for link in links)


def many(agents: Agents, folder: Path, runs: int) -> Path:
    with open_record(folder / "run-0") as record:
        write_step(record, agents, 1, tasks=1, repeats=1)
    for number in range(1, runs):
        shutil.copytree(folder / "run-0", folder / f"run-{number}")
    return folder


def test_only_recently_used_indexes_stay_open(agents: Agents, tmp_path: Path):
    folder, cache = many(agents, tmp_path / "runs", 100), tmp_path / "cache"
    cache.mkdir()
    with client(folder, cache) as session:
        assert len(session.get("/api/runs").json()) == 100
        assert 0 < open_files(cache) < 100
        for number in range(100):
            assert session.get(f"/api/run?run=run-{number}").json()["counts"]["episodes"] == 1
        assert 0 < open_files(cache) < 100
        for number in range(100):
            shutil.rmtree(folder / f"run-{number}")
        assert session.get("/api/runs").json() == []
        assert open_files(cache) == 0


def test_a_closed_index_can_still_be_read(agents: Agents, tmp_path: Path):
    folder, cache = many(agents, tmp_path / "runs", 2), tmp_path / "cache"
    cache.mkdir()
    indexes = IndexCache(Runs(folder), cache)
    held = indexes.of("run-0")
    with held.reading() as db:
        closing = threading.Thread(target=indexes.close)
        closing.start()
        assert db.execute("select count(*) from episodes").fetchone()[0] == 1
    closing.join()
    assert open_files(cache) == 0
    with held.reading() as db:
        assert db.execute("select count(*) from episodes").fetchone()[0] == 1
    assert open_files(cache) == 0


def test_the_list_shows_new_changed_and_removed_runs(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record, client(tmp_path, tmp_path) as session:

        def episodes() -> dict[str, int]:
            return {row["name"]: row["counts"]["episodes"] for row in session.get("/api/runs").json()}

        assert episodes() == {"run": 0}
        write_step(record, agents, 1, tasks=1, repeats=1)
        assert episodes() == {"run": 1}
        write_step(record, agents, 2, tasks=1, repeats=1)
        record.truncate_after(1)
        assert episodes() == {"run": 1}
        shutil.copytree(tmp_path / "run", tmp_path / "other")
        assert episodes() == {"run": 1, "other": 1}

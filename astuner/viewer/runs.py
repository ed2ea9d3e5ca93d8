"""The runs in a folder: their folders, their indexes, and their list."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.findings import FindingSummary, read_findings, summarise_findings
from astuner.run_record.folder import is_record
from astuner.run_record.recorded_run import RecordedRun, run_outcome, run_state
from astuner.run_record.summary import RunSummary
from astuner.viewer import queries
from astuner.viewer.index import RunIndex

# Files whose changes make a row of the run list outdated.
_LISTED_FILES = ("environment.json", "config.yaml", "summary.json", "note.json", "metrics.jsonl",
                 "episodes/index.jsonl", "episodes/pending.jsonl")  # fmt: skip
# Each open index needs three file descriptors, of which a process has few hundred.
_MAX_OPEN_INDEXES = 32

FileVersion = tuple[int, int, int]
"""Modification time, size and inode of a file."""


def _file_version(file: Path) -> FileVersion | None:
    """Return a value that changes with the content of a file; None if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Runs:
    """The runs in one folder. The folder is scanned on each call, because new runs may appear."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`: one run's folder, or a folder with runs, which may still be empty.

        Raises:
            RecordError: If there is no such folder.
        """
        self._folder = folder
        self._checked: dict[Path, FileVersion] = {}
        self._lock = threading.Lock()
        if not folder.is_dir():
            raise RecordError(
                f"{str(folder)!r} is not a folder; give a run's folder or a folder with runs such as "
                "launcher_record (astuner view DIR), or start a run first"
            )

    def all(self) -> dict[str, Path]:
        """Return the folders of the runs by name, the latest run first."""
        with self._lock:
            if self._start_time(self._folder) is not None:
                return {self._folder.resolve().name: self._folder}
            try:
                times = {folder: self._start_time(folder) for folder in self._folder.iterdir()}
            except OSError:
                return {}
            self._checked = {folder: version for folder, version in self._checked.items() if folder in times}
        latest_first = sorted(((time, folder) for folder, time in times.items() if time is not None), reverse=True)
        return {folder.name: folder for _, folder in latest_first}

    def folder(self, name: str) -> Path:
        """Return the folder of run `name`; `RecordError` if there is no such run."""
        runs = self.all()
        if name not in runs:
            raise RecordError(f"there is no run {name[:80]!r}; existing runs: {', '.join(list(runs)[:10])}")
        return runs[name]

    def _start_time(self, folder: Path) -> float | None:
        """Return the start time of the run in `folder`; None if it holds no run. Unchanged files are not read again."""
        version = _file_version(folder / "environment.json")
        if version is None:
            return None
        if self._checked.get(folder) != version:
            if not is_record(folder):
                return None
            self._checked[folder] = version
        return version[0] / 1e9


class IndexCache:
    """The indexes of runs; the most recently used ones stay open. Thread-safe."""

    def __init__(self, runs: Runs, cache: Path | None = None) -> None:
        self.runs = runs
        self._cache = cache
        self._open: dict[Path, RunIndex] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> RunIndex:
        """Return the index of a run; `RecordError` if there is no such run."""
        folder = self.runs.folder(name)
        with self._lock:
            # Removed and inserted again, so that the least recently used index is the first.
            index = self._open.pop(folder, None) or RunIndex(folder, self._cache)
            self._open[folder] = index
            surplus = [self._open.pop(oldest) for oldest in list(self._open)[:-_MAX_OPEN_INDEXES]]
        for other in surplus:
            other.close()
        return index

    def close_all_but(self, folders: set[Path]) -> None:
        """Close the indexes of folders that are not in `folders`."""
        with self._lock:
            removed = [self._open.pop(folder) for folder in self._open.keys() - folders]
        for index in removed:
            index.close()

    def close(self) -> None:
        """Close all indexes."""
        self.close_all_but(set())


class RunList:
    """The rows in the list of runs. Runs with unchanged files are not read again: the page polls every two seconds."""

    def __init__(self, indexes: IndexCache) -> None:
        self._indexes = indexes
        self._cached: dict[Path, tuple[tuple[FileVersion | None, ...], dict[str, Any], RunSummary | None]] = {}

    def metric_names(self) -> list[str]:
        """Return the metric names in all runs."""
        self.rows()
        return sorted({name for _, row, _ in self._cached.values() for name in row["last"]})

    def rows(self, metrics: Collection[str] = ()) -> list[dict[str, Any]]:
        """Return the rows, the latest run first. An unreadable run has the state `unreadable` and an `error`.

        Args:
            metrics: Names of the metrics whose last values (`last`) the rows contain.
        """
        runs = self._indexes.runs.all()
        self._indexes.close_all_but(set(runs.values()))
        cached, rows = {}, []
        for name, folder in runs.items():
            versions = tuple(_file_version(folder / file) for file in _LISTED_FILES)
            earlier = self._cached.get(folder)
            try:
                row, summary = earlier[1:] if earlier and earlier[0] == versions else self._read(name, folder)
            except (RecordError, sqlite3.Error, OSError) as error:
                counts = {"episodes": 0, "failed": 0, "step": 0, "bad_lines": 0}
                row = {"name": name, **_listed_facts(RecordedRun(folder)), "counts": counts, "rewards": [], "last": {}}
                rows.append({**row, "state": "unreadable", "error": str(error)})
            else:
                cached[folder] = versions, row, summary
                last = {metric: row["last"][metric] for metric in metrics if metric in row["last"]}
                rows.append({**row, "state": run_state(folder, summary), "last": last})
        self._cached = cached
        return rows

    def _read(self, name: str, folder: Path) -> tuple[dict[str, Any], RunSummary | None]:
        with self._indexes.of(name).reading() as db:
            last = db.execute("select name, value, max(id) from metrics where value is not null group by name")
            content: dict[str, Any] = {"counts": queries.counts(db)}
            content["last"] = {row["name"]: row["value"] for row in last}
            rewards = "select value from metrics where name = 'reward/mean' and value is not null order by id"
            content["rewards"] = [row["value"] for row in db.execute(rewards)]
            seconds = db.execute("select max(time) - min(time) from metrics").fetchone()[0]
        facts = RecordedRun(folder)
        row = {"name": name, **_listed_facts(facts), **content}
        # A run without a summary is running or was stopped.
        return {**row, "seconds": seconds if facts.summary is None else facts.summary.seconds}, facts.summary


def _listed_facts(facts: RecordedRun) -> dict[str, Any]:
    """Return the facts of a run for the list, without those that the index has."""
    summary = facts.summary
    return {
        "started": facts.started,
        "algorithm": facts.algorithm,
        "model": facts.model,
        "backbone": facts.backbone,
        "kind": facts.kind,
        "is_copy": facts.is_copy,
        "note": facts.note.text,
        "tags": facts.note.tags,
        "validation": summary.validation.model_dump() if summary else None,
        "seconds": summary.seconds if summary else None,
        "outcomes": summary.episodes.model_dump() if summary else None,
        "verdict": run_outcome(facts),
    }


def findings_of(folder: Path) -> list[FindingSummary]:
    """Return what the checks found in a run, errors first; damaged lines are left out."""
    try:
        return summarise_findings(read_findings(folder, on_damaged=lambda _: None))
    except RecordError:
        return []

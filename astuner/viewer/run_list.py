"""The list of a folder's runs."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.viewer import queries
from astuner.viewer.indexes import Indexes
from astuner.viewer.runs import config_of, run_state, summary_of

_FILES = ("environment.json", "config.yaml", "summary.json", "metrics.jsonl", "episodes/index.jsonl")
_Versions = tuple[tuple[int, int, int] | None, ...]
_NOTHING = {"counts": {"episodes": 0, "step": 0, "bad_lines": 0}, "rewards": []}


class RunList:
    """A row for each run. A run whose files are as they were is not read again: a page asks every two seconds."""

    def __init__(self, indexes: Indexes) -> None:
        self._indexes = indexes
        self._known: dict[Path, tuple[_Versions, dict[str, Any]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, the latest run first; one that cannot be read has the state `unreadable` and an `error`."""
        runs = self._indexes.runs.all()
        self._indexes.close_all_but(set(runs.values()))
        known, rows = {}, []
        for name, folder in runs.items():
            files = tuple(_version(folder / file) for file in _FILES)
            earlier = self._known.get(folder)
            try:
                row = earlier[1] if earlier and earlier[0] == files else self._read(name, folder)
            except (RecordError, sqlite3.Error, OSError) as error:
                rows.append({"name": name, **_about(folder), **_NOTHING, "state": "unreadable", "error": str(error)})
            else:
                known[folder] = files, row
                rows.append({**row, "state": run_state(folder)})
        self._known = known
        return rows

    def _read(self, name: str, folder: Path) -> dict[str, Any]:
        with self._indexes.of(name).reading() as db:
            found = {"counts": queries.counts(db), "rewards": queries.latest(db, "reward/mean")}
        return {"name": name, **_about(folder), **found}


def _about(folder: Path) -> dict[str, Any]:
    summary, config = summary_of(folder) or {}, config_of(folder)
    version = _version(folder / _FILES[0])
    return {
        "started": version[0] / 1e9 if version else 0,
        "algorithm": config.get("astuner.trainer_common.algorithm.adv_estimator"),
        "model": config.get("astuner.model.path"),
        "validation": summary.get("validation"),
        "seconds": summary.get("seconds"),
    }


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file's content; None where there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

"""Keeps the SQLite index of a run up to date with its record, reading only what is new."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner.run_record import Place, read_lines_after
from astuner.viewer.database import open_database

_LONGEST_TEXT = 200
_COLUMNS = (
    "path", "key", "step", "split", "task_key", "task", "episode", "repeat_index", "status", "reward", "is_success",
    "advantage", "calls", "samples", "dropped_samples", "tokens_raw", "tokens_distinct", "tokens_trained", "seconds",
    "error_kind", "forks",
)  # fmt: skip
_NUMBERS = (
    "repeat_index", "reward", "is_success", "advantage", "calls", "samples", "dropped_samples", "tokens_raw",
    "tokens_distinct", "tokens_trained", "seconds",
)  # fmt: skip


class RunIndex:
    """The episodes and metrics of one run in SQLite; safe to use from several threads and processes."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._connection = open_database(folder, cache)
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the database, as new as the record is now.

        Raises:
            RecordError: the record cannot be read.
        """
        with self._lock:
            self._follow("episodes/index.jsonl", _add_episode, ("episodes", "labels", "episode_labels"))
            self._follow("metrics.jsonl", _add_metrics, ("metrics",))
            yield self._connection

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()

    def _follow(self, file: str, add: Any, tables: Sequence[str]) -> None:
        db = self._connection
        # One transaction, with the place in it: two viewers of one run cannot read a line twice.
        db.execute("begin immediate")
        try:
            row = db.execute("select start, tail, bad from places where file = ?", (file,)).fetchone()
            place, bad = (Place(row["start"], row["tail"]), row["bad"]) if row else (Place(), 0)
            lines, new, anew = read_lines_after(self.folder / file, place)
            if anew:
                bad = 0
                for table in tables:
                    db.execute(f"delete from {table}")
            for line in lines:
                try:
                    add(db, json.loads(line))
                # A line that is none of ours, or was damaged, is counted and shown as missing.
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                    bad += 1
            if new != place or anew:
                db.execute("insert or replace into places values (?, ?, ?, ?)", (file, new.offset, new.tail, bad))
            db.execute("commit")
        except BaseException:
            db.execute("rollback")
            raise


def key_of(text: str) -> str:
    """Return a short name for any text, fit for addresses."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def shown(text: object) -> str:
    """Return a text short enough for a list, and such as UTF-8 can hold."""
    full = text if isinstance(text, str) else str(text)
    clean = full[: _LONGEST_TEXT + 1].encode("utf-8", "replace").decode()
    return clean if len(full) <= _LONGEST_TEXT else clean[:_LONGEST_TEXT] + "…"


def _add_episode(db: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    forks: Mapping[str, int] = row.get("forks") or {}
    task, episode = str(row["task_id"]), str(row["episode_id"])
    labels = [("fork", cause) for cause in forks]
    for kind, field in (("agent", "agents"), ("tag", "tags"), ("finish", "finish_reasons")):
        labels += [(kind, value) for value in row.get(field) or ()]
    values: dict[str, Any] = {name: _number(row.get(name)) for name in _NUMBERS}
    values |= {
        "path": str(row["path"]).encode("utf-8", "replace").decode(),
        "key": key_of(episode),
        "step": int(row["step"]),
        "split": "val" if row["split"] == "val" else "train",
        "task_key": key_of(task),
        "task": shown(task),
        "episode": shown(episode),
        "status": shown(row["status"]),
        "error_kind": None if row.get("error_kind") is None else shown(row["error_kind"]),
        "forks": sum(forks.values()),
    }
    # An episode that was written again has two lines; the later one holds.
    earlier = db.execute("select id from episodes where path = ?", (values["path"],)).fetchone()
    if earlier:
        db.execute("delete from episode_labels where episode = ?", (earlier["id"],))
        db.execute("delete from episodes where id = ?", (earlier["id"],))
    marks = ", ".join("?" * len(_COLUMNS))
    made = db.execute(
        f"insert into episodes ({', '.join(_COLUMNS)}) values ({marks})", [values[name] for name in _COLUMNS]
    )
    for kind, value in labels:
        db.execute("insert or ignore into labels (kind, value) values (?, ?)", (kind, shown(value)))
        db.execute(
            "insert or ignore into episode_labels select id, ? from labels where kind = ? and value = ?",
            (made.lastrowid, kind, shown(value)),
        )


def _number(value: object) -> float | int | None:
    """Return a number as it is, None for what is none: texts in the place of numbers must not reach the page."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _add_metrics(db: sqlite3.Connection, row: Mapping[str, Any]) -> None:
    step, time = int(row["step"]), float(row["time"])
    db.executemany(
        "insert into metrics (step, time, name, value) values (?, ?, ?, ?)",
        [(step, time, shown(name), _number(value)) for name, value in row["metrics"].items()],
    )

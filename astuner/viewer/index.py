"""Keeps the SQLite index of a run up to date with its record, reading only what is new."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner.run_record import Place, read_lines_after
from astuner.viewer import queries
from astuner.viewer.database import open_database

_LONGEST_TEXT = 200
_EPISODES = "episodes/index.jsonl"
_COLUMNS = (
    "id", "path", "key", "step", "split", "task_key", "task", "query", "episode", "repeat_index", "status", "reward",
    "is_success",
    "advantage", "calls", "samples", "dropped_samples", "tokens_raw", "tokens_distinct", "tokens_trained", "seconds",
    "error_kind", "forks", "words",
)  # fmt: skip
_COUNTS = (
    "repeat_index", "is_success", "calls", "samples", "dropped_samples", "tokens_raw", "tokens_distinct",
    "tokens_trained",
)  # fmt: skip
_REALS = ("reward", "advantage", "seconds")
# SQLite fails where a sum leaves 64 bits: those of a million episodes stay within.
_LARGEST_COUNT = 2**40
_LARGEST_REAL = 1e300


class RunIndex:
    """The episodes and metrics of one run in SQLite; safe to use from several threads and processes."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._cache = cache
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._steps: tuple[object, list[dict[str, Any]]] = (None, [])

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give the database, as new as the record is now.

        Raises:
            RecordError: the record cannot be read.
        """
        with self._lock:
            db = self._connection = self._connection or open_database(self.folder, self._cache)
            try:
                self._follow(db, _EPISODES, _Episodes)
                self._follow(db, "metrics.jsonl", _Metrics)
                yield db
            finally:
                # One who had the index before it was closed may still read it.
                if self._closed:
                    self._let_go()

    def steps(self, db: sqlite3.Connection) -> list[dict[str, Any]]:
        """Return `queries.steps`, summed anew only where episodes came: a page that follows a run asks often."""
        place = db.execute("select start, tail from places where file = ?", (_EPISODES,)).fetchone()
        version = tuple(place) if place else None
        if version is None or self._steps[0] != version:
            self._steps = (version, queries.steps(db))
        return self._steps[1]

    def close(self) -> None:
        """Close the database, also after each later `reading`."""
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _follow(self, db: sqlite3.Connection, file: str, make: type[_Episodes] | type[_Metrics]) -> None:
        # One transaction, with the place in it: two viewers of one run cannot read a line twice.
        db.execute("begin immediate")
        try:
            row = db.execute("select * from places where file = ?", (file,)).fetchone()
            place, bad = (Place(row["start"], row["tail"]), row["bad"]) if row else (Place(), 0)
            lines, new, anew = read_lines_after(self.folder / file, place)
            generation = row["generation"] if row and not anew else secrets.token_hex(8)
            if anew:
                bad = 0
                for table in make.tables:
                    db.execute(f"delete from {table}")
            if lines:
                rows = make(db)
                for line in lines:
                    try:
                        rows.add(json.loads(line))
                    # A line that is none of ours, or was damaged, is counted and shown as missing.
                    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                        bad += 1
                rows.write()
            if new != place or anew:
                db.execute(
                    "insert or replace into places values (?, ?, ?, ?, ?)",
                    (file, new.offset, new.tail, bad, generation),
                )
            db.execute("commit")
        except BaseException:
            # An error of the disk has ended it already.
            if db.in_transaction:
                db.execute("rollback")
            raise


def key_of(text: str) -> str:
    """Return a short name for any text, fit for addresses."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def shown(text: object) -> str:
    """Return a text short enough for a list, and such as UTF-8 can hold."""
    full = text if isinstance(text, str) else str(text)
    clean = _utf8(full[: _LONGEST_TEXT + 1])
    return clean if len(full) <= _LONGEST_TEXT else clean[:_LONGEST_TEXT] + "…"


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class _Episodes:
    """Lines of the record's index on their way into the database, all at once."""

    tables = ("episodes", "labels", "episode_labels")

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rows: list[list[Any]] = []
        self._labels: list[tuple[int, int]] = []
        self._label_ids = {(row["kind"], row["value"]): row["id"] for row in db.execute("select * from labels")}
        # Numbers are never given again: those of an episode that was replaced may still have labels.
        highest = (
            "select max(coalesce((select max(id) from episodes), 0), coalesce(max(episode), 0)) from episode_labels"
        )
        self._last: int = db.execute(highest).fetchone()[0]

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a line."""
        forks: Mapping[str, int] = row.get("forks") or {}
        labels = {("fork", shown(cause)) for cause in forks}
        for kind, field in (("agent", "agents"), ("tag", "tags"), ("finish", "finish_reasons")):
            labels |= {(kind, shown(value)) for value in row.get(field) or ()}
        values = _values(row) | {"id": self._last + 1, "forks": _whole(sum(forks.values()))}
        self._rows.append([values[name] for name in _COLUMNS])
        self._last += 1
        for label in labels:
            number = self._label_ids.setdefault(label, len(self._label_ids) + 1)
            self._labels.append((number, self._last))

    def write(self) -> None:
        """Write what was taken."""
        names = [(number, *label) for label, number in self._label_ids.items()]
        self._db.executemany("insert or ignore into labels (id, kind, value) values (?, ?, ?)", names)
        marks = ", ".join("?" * len(_COLUMNS))
        # An episode that was written again has two lines; the later one holds.
        self._db.executemany(f"insert or replace into episodes ({', '.join(_COLUMNS)}) values ({marks})", self._rows)
        self._db.executemany("insert or ignore into episode_labels values (?, ?)", sorted(self._labels))


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    task, episode = str(row["task_id"]), str(row["episode_id"])
    error = None if row.get("error_kind") is None else shown(row["error_kind"])
    query = shown(row.get("query") or "")
    values: dict[str, Any] = {name: _count(row.get(name)) for name in _COUNTS}
    values |= {name: _real(row.get(name)) for name in _REALS}
    return values | {
        "path": _utf8(str(row["path"])),
        "key": key_of(episode),
        "step": _whole(row["step"]),
        "split": "val" if row["split"] == "val" else "train",
        "task_key": key_of(task),
        "task": shown(task),
        "query": query,
        "episode": shown(episode),
        "status": shown(row["status"]),
        "error_kind": error,
        "words": "\n".join(
            (shown(task), query, shown(episode), error or "", _utf8(str(row.get("error") or "")[:500]))
        ).lower(),
    }


def _whole(value: Any) -> int:
    """Return a number without which its line means nothing.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or larger than any of a run.
    """
    number = int(value)
    if abs(number) > _LARGEST_COUNT:
        raise ValueError(f"{number:.3g} is no number of a run")
    return number


def _count(value: object) -> float | int | None:
    """Return a number as it is, None for what is none: texts in the place of numbers must not reach the page."""
    return value if isinstance(value, int | float) and abs(value) <= _LARGEST_COUNT else None


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST_REAL else None


class _Metrics:
    """Lines of `metrics.jsonl` on their way into the database."""

    tables = ("metrics",)

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rows: list[tuple[int, float, str, float | None]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a line."""
        step, time = _whole(row["step"]), float(row["time"])
        if not abs(time) < _LARGEST_REAL:
            raise ValueError("the time is no number")
        self._rows += [(step, time, shown(name), _real(value)) for name, value in row["metrics"].items()]

    def write(self) -> None:
        """Write what was taken."""
        self._db.executemany("insert into metrics (step, time, name, value) values (?, ?, ?, ?)", self._rows)

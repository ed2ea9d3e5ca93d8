"""The SQLite index of a run: updated from the lines that were added to the record since the last update."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from astuner.errors import without_variable_parts
from astuner.run_record.files import ReadPosition, read_new_lines
from astuner.run_record.recorded_run import file_in_run
from astuner.viewer.database import open_database, transaction
from astuner.viewer.text_index import EpisodeList, TextIndex, text_database

T = TypeVar("T")
_MAX_TEXT = 200
_MAX_ERROR = 500
_EPISODES = "episodes/index.jsonl"
_PENDING = "episodes/pending.jsonl"
_COLUMNS = (
    "id", "path", "key", "step", "split", "task_key", "task", "query", "episode", "repeat_index", "status", "reward",
    "is_success",
    "advantage", "calls", "samples", "dropped_samples", "tokens_raw", "tokens_distinct", "tokens_trained", "seconds",
    "error_kind", "forks", "answer", "error", "failure", "words",
)  # fmt: skip
_COUNTS = (
    "repeat_index", "is_success", "calls", "samples", "dropped_samples", "tokens_raw", "tokens_distinct",
    "tokens_trained",
)  # fmt: skip
_REALS = ("reward", "advantage", "seconds")
# SQLite fails if a sum exceeds 64 bits. Sums over a million episodes do not.
_MAX_COUNT = 2**40
_MAX_REAL = 1e300


class RunIndex:
    """The episodes and metrics of one run in SQLite. Safe for use by several threads and processes."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._cache = cache
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._cached: dict[str, tuple[object, Any]] = {}
        self.texts = TextIndex(text_database(folder, cache), partial(file_in_run, folder), self._episode_list)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Update the database from the record and yield it; `RecordError` if the record cannot be read."""
        with self._lock:
            db = self._connection = self._connection or open_database(self.folder, self._cache)
            try:
                # Read before the index: its lines move there, and would be missed otherwise.
                pending = read_new_lines(self.folder / _PENDING, ReadPosition())[:2]
                self._update(db, _EPISODES, _EpisodeRows)
                self._update_pending(db, *pending)
                self._update(db, "metrics.jsonl", _MetricRows)
                yield db
            finally:
                # A caller that obtained the index before it was closed may still use it.
                if self._closed:
                    self._disconnect()

    def cached(self, db: sqlite3.Connection, query: Callable[[sqlite3.Connection], T]) -> T:
        """Return `query(db)`, cached until episodes are added, because pages poll an active run."""
        version = self.version(db)
        earlier = self._cached.get(query.__name__)
        if not version or earlier is None or earlier[0] != version:
            earlier = self._cached[query.__name__] = (version, query(db))
        result: T = earlier[1]
        return result

    def generation(self, db: sqlite3.Connection) -> str:
        """Return a value that changes when the ids of the episodes change, as when the run is resumed."""
        row = db.execute("select generation from positions where file = ?", (_EPISODES,)).fetchone()
        return str(row["generation"]) if row else ""

    def version(self, db: sqlite3.Connection) -> object:
        """Return a value that changes when episodes are added or changed."""
        files = (_EPISODES, _PENDING)
        return list(map(tuple, db.execute("select start, tail from positions where file in (?, ?)", files)))

    def _episode_list(self) -> EpisodeList:
        with self.reading() as db:
            return EpisodeList(self.generation(db), dict(map(tuple, db.execute("select id, path from episodes"))))

    def close(self) -> None:
        """Close the databases. A later `reading` opens the index for its block only."""
        self.texts.close()
        with self._lock:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _update(self, db: sqlite3.Connection, file: str, row_writer: type[_EpisodeRows] | type[_MetricRows]) -> None:
        # The position is updated in the same transaction, so that two viewers of one run do not read a line twice.
        with transaction(db):
            row = db.execute("select * from positions where file = ?", (file,)).fetchone()
            position, bad = (ReadPosition(row["start"], row["tail"]), row["bad"]) if row else (ReadPosition(), 0)
            lines, new, restarted = read_new_lines(self.folder / file, position)
            generation = row["generation"] if row and not restarted else secrets.token_hex(8)
            if restarted:
                bad = 0
                for table in row_writer.tables:
                    db.execute(f"delete from {table}")
            if lines:
                rows = row_writer(db)
                bad += _add_lines(rows, lines)
                rows.write()
            if new != position or restarted:
                content = (file, new.offset, new.tail, bad, generation)
                db.execute("insert or replace into positions values (?, ?, ?, ?, ?)", content)

    def _update_pending(self, db: sqlite3.Connection, lines: list[bytes], position: ReadPosition) -> None:
        """Replace the pending episodes by those in `lines`, except for episodes that the index has by now."""
        with transaction(db):
            row = db.execute("select tail from positions where file = ?", (_PENDING,)).fetchone()
            if (row["tail"] if row else "") != position.tail:
                db.execute("delete from episodes where id in (select episode from pending)")
                db.execute("delete from pending")
                rows = _EpisodeRows(db, replaces=False)
                bad = _add_lines(rows, lines)
                db.executemany("insert into pending values (?)", [(number,) for number in rows.write()])
                content = (_PENDING, position.offset, position.tail, bad, "")
                db.execute("insert or replace into positions values (?, ?, ?, ?, ?)", content)


def _add_lines(rows: _EpisodeRows | _MetricRows, lines: Iterable[bytes]) -> int:
    """Add lines of a file, and return how many are damaged. The page shows their number."""
    bad = 0
    for line in lines:
        try:
            rows.add(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            bad += 1
    return bad


def key_of(text: str) -> str:
    """Return a hash of a text that is safe in URLs."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def shorten(text: object) -> str:
    """Return a text cut to the length for lists, and valid in UTF-8."""
    full = text if isinstance(text, str) else str(text)
    clean = valid_utf8(full[: _MAX_TEXT + 1])
    return clean if len(full) <= _MAX_TEXT else clean[:_MAX_TEXT] + "…"


def valid_utf8(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 cannot represent."""
    return text.encode("utf-8", "replace").decode()


class _EpisodeRows:
    """Collects lines of the record's index and writes them to the database in one batch."""

    tables = ("episodes", "labels", "episode_labels")

    def __init__(self, db: sqlite3.Connection, *, replaces: bool = True) -> None:
        """Create the collection; `replaces` tells whether a line replaces an earlier line of its episode."""
        self._db = db
        self._replaces = replaces
        self._rows: list[list[Any]] = []
        self._labels: list[tuple[int, int]] = []
        self._label_ids = {(row["kind"], row["value"]): row["id"] for row in db.execute("select * from labels")}
        # Ids are never reused: the labels of a replaced episode remain in the table.
        highest = (
            "select max(coalesce((select max(id) from episodes), 0), coalesce(max(episode), 0)) from episode_labels"
        )
        self._last: int = db.execute(highest).fetchone()[0]

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line of the record's episode index."""
        known = "select 1 from episodes where path = ?"
        if not self._replaces and self._db.execute(known, (valid_utf8(str(row["path"])),)).fetchone():
            return
        forks: Mapping[str, int] = row.get("forks") or {}
        labels = {("fork", shorten(cause)) for cause in forks}
        for kind, field in (("agent", "agents"), ("tag", "tags"), ("finish", "finish_reasons")):
            labels |= {(kind, shorten(value)) for value in row.get(field) or ()}
        values = _values(row) | {"id": self._last + 1, "forks": _integer(sum(forks.values()))}
        self._rows.append([values[name] for name in _COLUMNS])
        self._last += 1
        for label in labels:
            number = self._label_ids.setdefault(label, len(self._label_ids) + 1)
            self._labels.append((number, self._last))

    def write(self) -> list[int]:
        """Write the added lines to the database, and return their ids."""
        names = [(number, *label) for label, number in self._label_ids.items()]
        self._db.executemany("insert or ignore into labels (id, kind, value) values (?, ?, ?)", names)
        placeholders = ", ".join("?" * len(_COLUMNS))
        # An episode that was written twice has two lines; the later line is valid.
        self._db.executemany(
            f"insert or replace into episodes ({', '.join(_COLUMNS)}) values ({placeholders})", self._rows
        )
        self._db.executemany("insert or ignore into episode_labels values (?, ?)", sorted(self._labels))
        return [row[0] for row in self._rows]


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    task, episode = str(row["task_id"]), str(row["episode_id"])
    error = None if row.get("error_kind") is None else shorten(row["error_kind"])
    query, error_text = shorten(row.get("query") or ""), valid_utf8(str(row.get("error") or "")[:_MAX_ERROR])
    failure = f"{error or ''}\n{without_variable_parts(error_text)}" if row["status"] == "failed" else None
    values: dict[str, Any] = {name: _count(row.get(name)) for name in _COUNTS}
    values |= {name: _real(row.get(name)) for name in _REALS}
    return values | {
        "path": valid_utf8(str(row["path"])),
        "key": key_of(episode),
        "step": _integer(row["step"]),
        "split": "val" if row["split"] == "val" else "train",
        "task_key": key_of(task),
        "task": shorten(task),
        "query": query,
        "episode": shorten(episode),
        "status": shorten(row["status"]),
        "error_kind": error,
        "answer": None if row.get("answer") is None else valid_utf8(str(row["answer"])[:_MAX_ERROR]),
        "error": error_text or None,
        "failure": None if failure is None else key_of(failure),
        "words": "\n".join((shorten(task), query, shorten(episode), error or "", error_text)).lower(),
    }


def _integer(value: Any) -> int:
    number = int(value)
    if abs(number) > _MAX_COUNT:
        raise ValueError(f"{number:.3g} is too large")
    return number


def _count(value: object) -> float | int | None:
    """Return a number unchanged, and None for any other value, so that the viewer's page gets only numbers."""
    return value if isinstance(value, int | float) and abs(value) <= _MAX_COUNT else None


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_REAL else None


class _MetricRows:
    """Collects lines of `metrics.jsonl` and writes them to the database in one batch."""

    tables = ("metrics",)

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rows: list[tuple[int, float, str, float | None]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line of `metrics.jsonl`."""
        step, time = _integer(row["step"]), float(row["time"])
        if not abs(time) < _MAX_REAL:
            raise ValueError("the time is not a finite number")
        self._rows += [(step, time, shorten(name), _real(value)) for name, value in row["metrics"].items()]

    def write(self) -> None:
        """Write the added lines to the database."""
        self._db.executemany("insert into metrics (step, time, name, value) values (?, ?, ?, ?)", self._rows)

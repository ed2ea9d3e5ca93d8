"""The SQLite database of a run's index, in the user's cache. The record itself is never written to."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

# Increased with each change of the schema.
_VERSION = 10
_SCHEMA = """
create table if not exists episodes (
    id integer primary key, path text unique, key text, step integer, split text, task_key text, task text, query text,
    episode text, repeat_index integer, status text, reward real, is_success integer, advantage real,
    calls integer, samples integer, dropped_samples integer, tokens_raw integer, tokens_distinct integer,
    tokens_trained integer, seconds real, error_kind text, forks integer, answer text,
    error text, failure text, words text
);
create index if not exists episodes_key on episodes (key);
create index if not exists episodes_group on episodes (split, step, task_key, reward, is_success);
create index if not exists episodes_reward on episodes (reward, id);
create index if not exists episodes_task on episodes (task_key, split, step, id);
create index if not exists episodes_step on episodes (step, id);
create index if not exists episodes_error on episodes (error_kind) where error_kind is not null;
create index if not exists episodes_failure on episodes (failure) where failure is not null;
create table if not exists labels (id integer primary key, kind text, value text, unique (kind, value));
create table if not exists episode_labels (label integer, episode integer, primary key (label, episode)) without rowid;
create index if not exists labels_of_episode on episode_labels (episode);
create table if not exists pending (episode integer primary key);
create table if not exists metrics (id integer primary key, step integer, time real, name text, value real);
create table if not exists positions (file text primary key, start integer, tail text, bad integer, generation text);
"""


def open_database(folder: Path, cache: Path | None = None) -> sqlite3.Connection:
    """Open or create the database of the run in `folder`.

    If the file cannot be opened or locked, or there is no space, the database is created in memory. The folder of the
    databases is `cache`; by default `astuner/viewer` in the user's cache, or a temporary folder if that is read-only.
    """
    path = database_file(folder, cache, f"v{_VERSION}")
    for _ in range(2):
        try:
            return _open(path)
        except sqlite3.OperationalError:  # The file may be valid and in use by another process.
            break
        except sqlite3.DatabaseError:  # The file is damaged. SQLite's journals would be applied to a new file.
            remove_database(path)
    return _open(Path(":memory:"))


def remove_database(path: Path) -> None:
    """Remove a database and its journals."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes; an exception undoes it."""
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        # An error of the disk has already ended the transaction.
        if db.in_transaction:
            db.execute("rollback")
        raise


def database_file(folder: Path, cache: Path | None, version: str) -> Path:
    """Return the database file for the run in `folder`, in the folder `cache` (see `open_database`).

    The schema's `version` is part of the name, as several viewers' versions may run at the same time.
    """
    digest = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return (cache or _cache_folder()) / f"{digest}.{version}.sqlite3"


def remove_least_recent(cache: Path, max_bytes: int, keep: Path) -> None:
    """Remove the databases in `cache` that changed longest ago, except `keep`, until all fit into `max_bytes`."""
    sizes: list[tuple[float, int, Path]] = []
    for path in cache.glob("*.sqlite3"):
        with suppress(OSError):
            status = path.stat()
            sizes.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in sizes)
    for _, size, path in sorted(sizes):
        if total <= max_bytes:
            return
        # A viewer that has the file open continues to use it, and creates it again when it opens the run again.
        if path != keep:
            with suppress(OSError):
                remove_database(path)
            total -= size


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        if connection.execute("pragma user_version").fetchone()[0] != _VERSION:
            connection.executescript(
                f"pragma journal_mode = wal; begin immediate; {_SCHEMA} pragma user_version = {_VERSION}; commit;"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "astuner" / "viewer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="astuner-viewer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

"""The index of a run as an SQLite file in the user's cache: the record itself is never written to."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
from pathlib import Path

_VERSION = 2
_SCHEMA = f"""
create table episodes (
    id integer primary key, path text unique, key text, step integer, split text, task_key text, task text,
    episode text, repeat_index integer, status text, reward real, is_success integer, advantage real,
    calls integer, samples integer, dropped_samples integer, tokens_raw integer, tokens_distinct integer,
    tokens_trained integer, seconds real, error_kind text, forks integer, words text
);
create index episodes_key on episodes (key);
create index episodes_group on episodes (split, step, task_key);
create index episodes_reward on episodes (reward, id);
create index episodes_step on episodes (step, id);
create index episodes_error on episodes (error_kind) where error_kind is not null;
create table labels (id integer primary key, kind text, value text, unique (kind, value));
create table episode_labels (label integer, episode integer, primary key (label, episode)) without rowid;
create index labels_of_episode on episode_labels (episode);
create table metrics (id integer primary key, step integer, time real, name text, value real);
create table places (file text primary key, start integer, tail text, bad integer);
pragma user_version = {_VERSION};
"""


def open_database(folder: Path, cache: Path | None = None) -> sqlite3.Connection:
    """Open the index of the run in `folder`, a new one where there is none that this version can read.

    Args:
        folder: the run's.
        cache: where indexes lie; by default `astuner/viewer` in the user's cache, or a temporary folder where that
            cannot be written.
    """
    identity = str(folder.resolve())
    name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:24] + ".sqlite3"
    path = (cache or _cache_folder()) / name
    for _ in range(2):
        try:
            connection = _open(path)
        except sqlite3.DatabaseError:
            path.unlink(missing_ok=True)
        else:
            return connection
    return _open(Path(":memory:"))


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
    connection.row_factory = sqlite3.Row
    version = connection.execute("pragma user_version").fetchone()[0]
    if version == _VERSION:
        return connection
    if version != 0 or connection.execute("select count(*) from sqlite_master").fetchone()[0]:
        connection.close()
        raise sqlite3.DatabaseError("an index of another version")
    connection.executescript(f"pragma journal_mode = wal; begin immediate; {_SCHEMA} commit;")
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
    return Path(tempfile.mkdtemp(prefix="astuner-viewer-"))

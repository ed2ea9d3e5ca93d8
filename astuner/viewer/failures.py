"""Groups of failed episodes: episodes whose error messages differ only in numbers, ids and addresses."""

from __future__ import annotations

import sqlite3
from typing import Any

_MAX_GROUPS = 50


def failures(db: sqlite3.Connection) -> dict[str, Any]:
    """Return a run's failed episodes, grouped by error message, the largest group first.

    Returns:
        `episodes`, the number of failed episodes; `groups`, each with its `key`, its number of `episodes`, `tasks` and
        different `messages`, its `first_step` and `last_step`, and the `kind`, `error`, `path` and key (`episode`) of
        its latest episode; and `omitted`, the number of groups that are not listed.
    """
    total, groups = db.execute(
        "select count(*), count(distinct failure) from episodes where failure is not null"
    ).fetchone()
    rows = db.execute(
        "select failure as key, count(*) as episodes, count(distinct task_key) as tasks, "
        "count(distinct error) as messages, min(step) as first_step, max(step) as last_step, max(id) as latest "
        "from episodes where failure is not null group by failure order by episodes desc, latest desc limit ?",
        (_MAX_GROUPS,),
    ).fetchall()
    found = []
    for row in rows:
        latest = "select error_kind as kind, error, key as episode, path from episodes where id = ?"
        found.append({**dict(row), **dict(db.execute(latest, (row["latest"],)).fetchone())})
    return {"episodes": total, "groups": found, "omitted": groups - len(found)}

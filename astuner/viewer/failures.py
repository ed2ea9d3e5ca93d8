"""Groups of failed episodes: episodes whose error messages differ only in numbers, ids and addresses."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

_MAX_GROUPS = 50
_MAX_KEY = 200
_WORD = re.compile(r"[\w./:@\\\-+%]+")
_DIGIT = re.compile(r"\d")
_HEX = re.compile(r"[0-9a-f]{12,}", re.IGNORECASE)
_REPEATED = re.compile(r"#(?:[\s,;:'\"()\[\]]*#)+")


def without_variable_parts(message: str) -> str:
    """Return an error message with `#` for its numbers, ids, addresses and paths that have digits.

    Two messages with the same result belong to one group. Lists of such parts of any length become one `#`.
    """

    def replace(word: re.Match[str]) -> str:
        # A word with a digit is a number, an id, an address, a port, or a path with a version or a temporary file.
        return "#" if _DIGIT.search(word[0]) or _HEX.fullmatch(word[0]) else word[0]

    text = _REPEATED.sub("#", _WORD.sub(replace, message))
    return " ".join(text.split())[:_MAX_KEY]


def failures(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the failed episodes of a run in groups of one error message, the largest group first.

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

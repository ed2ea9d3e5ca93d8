"""What the pages ask of a run's index."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any, Literal

Order = Literal["latest", "step", "reward", "reward_up", "tokens", "forks", "seconds"]
_ORDERS: dict[str, str] = {
    "latest": "id desc",
    "step": "step, id",
    "reward": "reward desc, id desc",
    "reward_up": "reward is null, reward, id desc",
    "tokens": "tokens_raw desc, id desc",
    "forks": "forks desc, id desc",
    "seconds": "seconds desc, id desc",
}
_MOST_LABELS = 200


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes of a run; None does not ask.

    Attributes:
        split, step, status: as in the record's index.
        task: a task's key.
        agent, tag, finish, fork: episodes that have a call with it.
        error: the kind of the error; `any` for every kind.
        least, most: bounds of the reward, both inclusive.
        text: part of the task's id, the episode's id, the error's kind, the first 200 characters of the task's query,
            or the first 500 of the error.
    """

    split: str | None = None
    step: int | None = None
    status: str | None = None
    task: str | None = None
    agent: str | None = None
    tag: str | None = None
    finish: str | None = None
    fork: str | None = None
    error: str | None = None
    least: float | None = None
    most: float | None = None
    text: str | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """Return an SQL condition and its values."""
        parts: list[str] = ["1"]
        values: list[Any] = []
        plain: dict[str, Any] = {
            "split = ?": self.split, "step = ?": self.step, "status = ?": self.status, "task_key = ?": self.task,
            "reward >= ?": self.least, "reward <= ?": self.most,
        }  # fmt: skip
        for kind in ("agent", "tag", "finish", "fork"):
            of_label = "select id from labels where kind = '" + kind + "' and value = ?"
            plain[f"id in (select episode from episode_labels where label = ({of_label}))"] = getattr(self, kind)
        for part, value in plain.items():
            if value is not None:
                parts.append(part)
                values.append(value)
        if self.error == "any":
            parts.append("error_kind is not null")
        elif self.error is not None:
            parts.append("error_kind = ?")
            values.append(self.error)
        if self.text:
            parts.append("instr(words, ?)")
            values.append(self.text.lower())
        return " and ".join(parts), values


def episodes(db: sqlite3.Connection, wanted: EpisodeFilter, order: Order, offset: int, limit: int) -> dict[str, Any]:
    """Return a page of a run's episodes, and how many there are in all."""
    condition, values = wanted.condition()
    total = db.execute(f"select count(*) from episodes where {condition}", values).fetchone()[0]
    rows = db.execute(
        f"select * from episodes where {condition} order by {_ORDERS[order]} limit ? offset ?",
        [*values, limit, offset],
    )
    return {"total": total, "offset": offset, "rows": [_row(row) for row in rows]}


def episode_by_key(db: sqlite3.Connection, key: str) -> dict[str, Any] | None:
    """Return the latest episode with this key, or with this id."""
    for column in ("key", "episode"):
        row = db.execute(f"select * from episodes where {column} = ? order by id desc limit 1", (key,)).fetchone()
        if row:
            return _row(row)
    return None


def labels(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Return what can be filtered by: agents, tags, finish reasons, causes of forks and errors."""
    found: dict[str, list[str]] = {"agent": [], "tag": [], "finish": [], "fork": [], "error": []}
    for row in db.execute("select kind, value from labels order by kind, value"):
        if len(found[row["kind"]]) < _MOST_LABELS:
            found[row["kind"]].append(row["value"])
    errors = db.execute(
        "select distinct error_kind from episodes where error_kind is not null limit ?", (_MOST_LABELS,)
    )
    found["error"] = sorted(row["error_kind"] for row in errors)
    return found


_SUMS = """count(*) as episodes, avg(reward) as reward, min(reward) as least, max(reward) as most,
    avg(is_success) as success, sum(status = 'failed') as failed, sum(status = 'dropped') as dropped,
    sum(calls) as calls, sum(samples) as samples, sum(forks) as forks, sum(tokens_raw) as tokens_raw,
    sum(tokens_distinct) as tokens_distinct, sum(tokens_trained) as tokens_trained"""


def steps(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return what the episodes of each step and split came to, the latest first."""
    sql = f"select step, split, count(distinct task_key) as groups, {_SUMS} from episodes group by split, step"
    return [dict(row) for row in db.execute(f"{sql} order by step desc, split")]


def groups(db: sqlite3.Connection, step: int, split: str) -> list[dict[str, Any]]:
    """Return the groups of a step: the episodes of each task."""
    sql = f"select task_key, min(task) as task, min(query) as query, {_SUMS} from episodes where step = ? and split = ?"
    return [dict(row) for row in db.execute(f"{sql} group by task_key order by min(id)", (step, split))]


def metrics(db: sqlite3.Connection, after: int, generation: str | None) -> dict[str, Any]:
    """Return the metrics logged after row `after`: step, time and value by name, and the last row's number.

    Rows are numbered anew when the run is resumed at an earlier step, or started again: where `generation`, that of the
    answer that `after` is from, is no longer the present one, all rows are returned, and `anew` is true.
    """
    place = db.execute("select generation from places where file = 'metrics.jsonl'").fetchone()
    present = place["generation"] if place else None
    anew = after > 0 and generation != present
    if anew:
        after = 0
    series: dict[str, list[list[float | None]]] = {}
    last = after
    for row in db.execute("select * from metrics where id > ? order by id", (after,)):
        series.setdefault(row["name"], []).append([row["step"], row["time"], row["value"]])
        last = row["id"]
    return {"last": last, "generation": present, "anew": anew, "series": series}


def counts(db: sqlite3.Connection) -> dict[str, Any]:
    """Return how much the index holds, and how many lines of the record could not be read."""
    row = db.execute("select count(*) as episodes, max(step) as step from episodes").fetchone()
    last = db.execute("select max(step) from metrics").fetchone()[0]
    bad = db.execute("select sum(bad) from places").fetchone()[0]
    return {"episodes": row["episodes"], "step": max(row["step"] or 0, last or 0), "bad_lines": bad or 0}


def latest(db: sqlite3.Connection, name: str) -> list[float]:
    """Return the values of a metric, in order, for a small chart."""
    rows = db.execute("select value from metrics where name = ? and value is not null order by id", (name,))
    return [row["value"] for row in rows]


def _row(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    del found["words"]
    found["is_success"] = None if row["is_success"] is None else bool(row["is_success"])
    return found

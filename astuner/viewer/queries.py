"""SQL queries for the pages on a run's index, and the search in its episodes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from astuner.viewer.index import RunIndex
from astuner.viewer.text_query import KINDS, parse_query

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
_MAX_LABELS = 200
# The extremes of a task's episodes: name, order, and whether only episodes with a reward count.
_PICKS = {
    "best": ("reward desc, id desc", True),
    "worst": ("reward, id desc", True),
    "first": ("step, id", False),
    "last": ("step desc, id desc", False),
}
_MAX_GROUPS = 50


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Conditions on the episodes of a run. None means no condition.

    Attributes:
        split, step, status: As in the record's index.
        task: Key of a task.
        agent, tag, finish, fork: Value that at least one call of the episode has.
        error: Kind of the error; `any` matches all kinds.
        failure: Key of a group in `failures`; see `failures`.
        least, most: Inclusive bounds of the reward.
        text: Part of the task id, the episode id, the error kind, the task query's first 200 characters, or the error's
            first 500 characters.
        ids: Ids of episodes. An episode matches if it has one of them or contains `text`.
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
    failure: str | None = None
    least: float | None = None
    most: float | None = None
    text: str | None = None
    ids: Sequence[int] | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """Return an SQL condition and its values."""
        parts: list[str] = ["1"]
        values: list[Any] = []
        conditions: dict[str, Any] = {
            "split = ?": self.split, "step = ?": self.step, "status = ?": self.status, "task_key = ?": self.task,
            "failure = ?": self.failure, "reward >= ?": self.least, "reward <= ?": self.most,
        }  # fmt: skip
        for kind in ("agent", "tag", "finish", "fork"):
            of_label = "select id from labels where kind = '" + kind + "' and value = ?"
            conditions[f"id in (select episode from episode_labels where label = ({of_label}))"] = getattr(self, kind)
        for part, value in conditions.items():
            if value is not None:
                parts.append(part)
                values.append(value)
        if self.error == "any":
            parts.append("error_kind is not null")
        elif self.error is not None:
            parts.append("error_kind = ?")
            values.append(self.error)
        # One parameter for all ids, because SQLite limits the number of parameters.
        alternatives = {"instr(words, ?)": self.text and self.text.lower()}
        alternatives["id in (select value from json_each(?))"] = None if self.ids is None else json.dumps(self.ids)
        searched = {part: value for part, value in alternatives.items() if value}
        if searched:
            parts.append(f"({' or '.join(searched)})")
            values += searched.values()
        return " and ".join(parts), values


def episodes(db: sqlite3.Connection, matching: EpisodeFilter, order: Order, offset: int, limit: int) -> dict[str, Any]:
    """Return at most `limit` matching episodes after the first `offset`, and how many match in all."""
    condition, values = matching.condition()
    total = db.execute(f"select count(*) from episodes where {condition}", values).fetchone()[0]
    rows = db.execute(
        f"select * from episodes where {condition} order by {_ORDERS[order]} limit ? offset ?",
        [*values, limit, offset],
    )
    return {"total": total, "offset": offset, "rows": [row_values(row) for row in rows]}


def episode_by_key(db: sqlite3.Connection, key: str) -> dict[str, Any] | None:
    """Return the latest episode with this key or id."""
    for column in ("key", "episode"):
        row = db.execute(f"select * from episodes where {column} = ? order by id desc limit 1", (key,)).fetchone()
        if row:
            return row_values(row)
    return None


def labels(db: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the filters' values: agents, tags, finish reasons, fork causes, and error kinds."""
    values: dict[str, list[str]] = {"agent": [], "tag": [], "finish": [], "fork": [], "error": []}
    for row in db.execute("select kind, value from labels order by kind, value"):
        if len(values[row["kind"]]) < _MAX_LABELS:
            values[row["kind"]].append(row["value"])
    errors = db.execute("select distinct error_kind from episodes where error_kind is not null limit ?", (_MAX_LABELS,))
    values["error"] = sorted(row["error_kind"] for row in errors)
    return values


_SUMS = """count(*) as episodes, avg(reward) as reward, min(reward) as least, max(reward) as most,
    avg(is_success) as success, sum(status = 'failed') as failed, sum(status = 'dropped') as dropped,
    sum(calls) as calls, sum(samples) as samples, sum(forks) as forks, sum(tokens_raw) as tokens_raw,
    sum(tokens_distinct) as tokens_distinct, sum(tokens_trained) as tokens_trained"""


def steps(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return sums and means over the episodes of each step and split, the latest step first."""
    sql = f"select step, split, count(distinct task_key) as groups, {_SUMS} from episodes group by split, step"
    return [dict(row) for row in db.execute(f"{sql} order by step desc, split")]


def groups(db: sqlite3.Connection, step: int, split: str) -> list[dict[str, Any]]:
    """Return sums and means over each group in a step, that is, over the episodes for a task."""
    sql = f"select task_key, min(task) as task, min(query) as query, {_SUMS} from episodes where step = ? and split = ?"
    return [dict(row) for row in db.execute(f"{sql} group by task_key order by min(id)", (step, split))]


def metrics(db: sqlite3.Connection, after: int, generation: str | None) -> dict[str, Any]:
    """Return the metrics logged after row `after`.

    The file is rewritten when a run is resumed from an earlier step or restarted. If this has happened since the
    response from which `after` is taken, all rows are returned.

    `after` and `generation` are `last` and `generation` in an earlier response, or 0 and None.

    Returns:
        `series`, a list of [step, time, value] by name; `last`, the number of the last row; `generation` of the file;
        and `restarted`, True if all rows are returned because the file was rewritten.
    """
    position = db.execute("select generation from positions where file = 'metrics.jsonl'").fetchone()
    present = position["generation"] if position else None
    restarted = after > 0 and generation != present
    if restarted:
        after = 0
    series: dict[str, list[list[float | None]]] = {}
    last = after
    for row in db.execute("select * from metrics where id > ? order by id", (after,)):
        series.setdefault(row["name"], []).append([row["step"], row["time"], row["value"]])
        last = row["id"]
    return {"last": last, "generation": present, "restarted": restarted, "series": series}


def counts(db: sqlite3.Connection) -> dict[str, Any]:
    """Return how many episodes, failed episodes and damaged record lines there are, and the last step."""
    row = db.execute("select count(*) as episodes, max(step) as step from episodes").fetchone()
    failed = db.execute("select count(*) from episodes where failure is not null").fetchone()[0]
    last = db.execute("select max(step) from metrics").fetchone()[0]
    bad = db.execute("select sum(bad) from positions").fetchone()[0]
    step = max(row["step"] or 0, last or 0)
    return {"episodes": row["episodes"], "failed": failed, "step": step, "bad_lines": bad or 0}


def row_values(row: sqlite3.Row) -> dict[str, Any]:
    """Return an episode of the index for a page."""
    values = dict(row)
    del values["words"]
    values["is_success"] = None if row["is_success"] is None else bool(row["is_success"])
    return values


def task_steps(db: sqlite3.Connection, task: str) -> list[dict[str, Any]]:
    """Return a task's episode and failure counts and rewards, by split and step; `task` is its key."""
    sql = """select split, step, count(*) as episodes, sum(status = 'failed') as failed, avg(reward) as reward,
        min(reward) as least, max(reward) as most, avg(is_success) as success, min(task) as task, min(query) as query
        from episodes where split = ? and task_key = ? group by step order by step"""
    # Two queries, as the index of groups begins with the split.
    return [dict(row) for split in ("val", "train") for row in db.execute(sql, (split, task))]


def task_picks(db: sqlite3.Connection, task: str, split: str) -> dict[str, dict[str, Any] | None]:
    """Return the best, the worst, the first and the last episode of a task in a split; None if there is none."""
    picks = {}
    for name, (order, with_reward) in _PICKS.items():
        condition = "split = ? and task_key = ?" + (" and reward is not null" if with_reward else "")
        row = db.execute(f"select * from episodes where {condition} order by {order} limit 1", (split, task)).fetchone()
        picks[name] = row and row_values(row)
    return picks


def neighbours(db: sqlite3.Connection, row: dict[str, Any]) -> dict[str, str | None]:
    """Return the keys of the previous and the next episode in an episode's step, in record order."""
    keys = {}
    for name, comparison, order in (("previous", "<", "desc"), ("next", ">", "asc")):
        sql = f"select key from episodes where split = ? and step = ? and id {comparison} ? order by id {order} limit 1"
        found = db.execute(sql, (row["split"], row["step"], row["id"])).fetchone()
        keys[name] = found and found["key"]
    return keys


def failures(db: sqlite3.Connection) -> dict[str, Any]:
    """Return a run's failed episodes, grouped by error message, the largest group first.

    Returns:
        `episodes`, how many episodes failed; `groups`, each with its `key`, its counts `episodes`, `tasks` and
        different `messages`, its `first_step` and `last_step`, and the `kind`, `error`, `path` and key (`episode`) of
        its latest episode; and `omitted`, how many groups are not listed.
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


def find_episodes(
    index: RunIndex, matching: EpisodeFilter, kind: str | None, order: Order, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of the matching episodes. Also starts to read the texts of new episodes for later searches.

    Args:
        index: The run's index.
        matching: The conditions. Its `text` is a query of the text search; see `parse_query`.
        kind: Kind of the texts to search; anything outside `KINDS` also searches tasks' ids and queries.
        order, offset, limit: As for `episodes`.

    Returns:
        The page as `queries.episodes` returns it. With a text, `search` describes the search so far (see `TextHits`),
        and the rows have an `excerpt`: the role of the author, and the text in parts, each with whether it matches.
    """
    with index.reading() as db:
        version = index.version(db)
        index.texts.refresh(version)
        generation, total = index.generation(db), counts(db)["episodes"]
    column = kind if kind in KINDS else None
    query = parse_query(matching.text or "")
    hits = index.texts.search(query, column, generation, total, version) if query.text else None
    if hits is not None:
        matching = replace(matching, ids=hits.ids, text=None if column else query.text)
    with index.reading() as db:
        page = episodes(db, matching, order, offset, limit)
    rows = page["rows"]
    unknown = [row["id"] for row in rows if row["answer"] is None]
    answers = index.texts.answers(unknown, generation)
    ids = [row["id"] for row in rows]
    excerpts = index.texts.excerpts(query, column, hits.mode, ids, generation) if hits else {}
    for row in rows:
        row["answer"] = row["answer"] if row["answer"] is not None else answers.get(row["id"])
        row["excerpt"] = excerpts.get(row["id"])
    return page if hits is None else {**page, "search": {"mode": hits.mode, **hits.facts}}

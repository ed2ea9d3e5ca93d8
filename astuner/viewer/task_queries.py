"""SQL queries about one task over the steps of a run."""

from __future__ import annotations

import sqlite3
from typing import Any

from astuner.viewer import queries

# The extremes of a task's episodes: name, order, and whether only episodes with a reward count.
_PICKS = {
    "best": ("reward desc, id desc", True),
    "worst": ("reward, id desc", True),
    "first": ("step, id", False),
    "last": ("step desc, id desc", False),
}


def task_steps(db: sqlite3.Connection, task: str) -> list[dict[str, Any]]:
    """Return a task's numbers of episodes and failures, and its rewards, by split and step.

    Args:
        db: The run's database.
        task: The task's key.
    """
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
        picks[name] = row and queries.row_values(row)
    return picks


def neighbours(db: sqlite3.Connection, row: dict[str, Any]) -> dict[str, str | None]:
    """Return the keys of the previous and the next episode in an episode's step, in record order."""
    keys = {}
    for name, comparison, order in (("previous", "<", "desc"), ("next", ">", "asc")):
        sql = f"select key from episodes where split = ? and step = ? and id {comparison} ? order by id {order} limit 1"
        found = db.execute(sql, (row["split"], row["step"], row["id"])).fetchone()
        keys[name] = found and found["key"]
    return keys

"""Data of a run's charts: rewards by step, validations with intervals, and results by task and step."""

from __future__ import annotations

import math
import sqlite3
from itertools import groupby
from typing import Any

from astuner.run_record.metrics import mean_interval, success_interval
from astuner.schema import Split

# Resolution of quantiles, in parts of all rewards' range. Rewards with few values are exact.
_FINE_BINS = 200
_HISTOGRAM_BINS = 20


def rewards_by_step(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the distribution of training rewards in each step.

    Returns:
        `low` and `high`, the range of all rewards; `bins`, how many equal bins divide this range; and `steps`, one
        entry per step with how many `episodes` have a reward, their `mean`, `least` and `most` reward, the quantiles
        `q10`, `median` and `q90`, and `histogram`, pairs with a bin and its episode count.
    """
    scored = "from episodes where split = 'train' and reward is not null"
    low, high = db.execute(f"select min(reward), max(reward) {scored}").fetchone()
    if low is None:
        return {"low": None, "high": None, "bins": _HISTOGRAM_BINS, "steps": []}
    width = (high - low) / _FINE_BINS or 1.0
    rows = db.execute(
        f"select step, cast((reward - ?) / ? as integer) as bin, count(*), sum(reward), min(reward), max(reward) "
        f"{scored} group by step, bin order by step, bin",
        (low, width),
    )
    steps = [
        _reward_statistics(step, [tuple(row)[1:] for row in group]) for step, group in groupby(rows, lambda r: r[0])
    ]
    return {"low": low, "high": high, "bins": _HISTOGRAM_BINS, "steps": steps}


def _reward_statistics(step: int, bins: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the statistics of a step from its (bin, number, sum, least, most) in ascending order."""
    number = sum(row[1] for row in bins)
    histogram: dict[int, int] = {}
    for fine, episodes, *_ in bins:
        coarse = min(fine * _HISTOGRAM_BINS // _FINE_BINS, _HISTOGRAM_BINS - 1)
        histogram[coarse] = histogram.get(coarse, 0) + episodes

    def quantile(share: float) -> float:
        """Return the mean reward of the bin that contains the quantile."""
        seen = 0
        for _, episodes, total, *_ in bins:
            seen += episodes
            if seen >= share * number:
                return float(total / episodes)
        raise AssertionError("the bins contain all episodes")

    return {
        "step": step, "episodes": number, "mean": sum(row[2] for row in bins) / number,
        "least": bins[0][3], "most": bins[-1][4],
        "q10": quantile(0.1), "median": quantile(0.5), "q90": quantile(0.9),
        "histogram": list(histogram.items()),
    }  # fmt: skip


def validations(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return the success rate and the mean reward of each validation, with 95% intervals.

    They are counted from the validation episodes. A validation whose episodes are not recorded has the values from the
    metrics, without a reward interval.

    Returns:
        One entry by step: `step`; `episodes` with a reward; `success` and `reward`; `success_interval` and
        `reward_interval`, each [low, high] or None.
    """
    measured: dict[int, dict[str, Any]] = {}
    names = ("val/success_rate", "val/reward", "val/episodes")
    for row in db.execute("select step, name, value from metrics where name in (?, ?, ?) order by id", names):
        measured.setdefault(row["step"], {})[row["name"]] = row["value"]
    points = {
        step: _validation(step, values.get(names[1]), None, values.get(names[0]), values.get(names[2]) or 0)
        for step, values in measured.items()
    }
    rows = db.execute(
        """select step, count(reward), avg(reward), sum(reward * reward), avg(is_success), count(is_success)
        from episodes where split = 'val' group by step"""
    )
    for step, rewards, mean, squares, success, judged in rows:
        if rewards:
            spread = max(squares / rewards - mean * mean, 0.0) * rewards / (rewards - 1) if rewards > 1 else None
            # Equal rewards give an interval of zero width, which claims a certainty that nobody has.
            interval = list(mean_interval(mean, spread, rewards)) if spread and math.isfinite(spread) else None
            points[step] = _validation(step, mean, interval, success, judged) | {"episodes": rewards}
    return [points[step] for step in sorted(points)]


def _validation(
    step: int, reward: float | None, reward_interval: list[float] | None, success: float | None, episodes: float
) -> dict[str, Any]:
    interval = None
    if success is not None and 0 <= success <= 1 and episodes >= 1:
        interval = list(success_interval(success, int(episodes)))
    return {
        "step": step, "episodes": int(episodes), "reward": reward, "reward_interval": reward_interval,
        "success": success, "success_interval": interval,
    }  # fmt: skip


def training_results(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the results of each training task at each step; see `_results_by_task`."""
    return _results_by_task(db, "train")


def validation_results(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the results of each validation task at each step; see `_results_by_task`."""
    return _results_by_task(db, "val")


def _results_by_task(db: sqlite3.Connection, split: Split) -> dict[str, Any]:
    """Return the results of each task at each step.

    Returns:
        `steps` in ascending order; `tasks`, each with `key`, `task` and `query`; and `cells`, one for each task and
        step: their indices, how many episodes there are, are judged a success or not, are a success and have a reward,
        and the rewards' sum.
    """
    first = "select min(id) from episodes where split = ? group by task_key"
    tasks = db.execute(f"select task_key, task, query from episodes where id in ({first}) order by id", (split,))
    listed = [{"key": row["task_key"], "task": row["task"], "query": row["query"]} for row in tasks]
    numbers = {task["key"]: number for number, task in enumerate(listed)}
    rows = db.execute(
        """select task_key, step, count(*), count(is_success), sum(is_success), count(reward), sum(reward)
        from episodes where split = ? group by step, task_key order by step""",
        (split,),
    ).fetchall()
    steps = sorted({row["step"] for row in rows})
    places = {step: place for place, step in enumerate(steps)}
    cells = [[numbers[row[0]], places[row[1]], row[2], row[3], row[4] or 0, row[5], row[6] or 0] for row in rows]
    return {"steps": steps, "tasks": listed, "cells": cells}

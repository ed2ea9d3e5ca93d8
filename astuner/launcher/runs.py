"""`astuner runs`: list, compare, annotate and delete the recorded runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.errors import RecordError, shorten
from astuner.run_record import (
    FolderLock,
    RunFacts,
    ValidationSummary,
    config_difference,
    difference_interval,
    is_record,
    read_facts,
    read_metrics,
)

_STYLES = {"running": "green", "finished": "", "failed": "bold red", "stopped": "yellow"}
# Keys that differ between any two runs.
_NAMES = ("astuner.experiment_name", "astuner.experiment_dir")


def read_runs(exp_dir: Path) -> list[RunFacts]:
    """Return the runs in a folder, the latest first.

    Raises:
        RecordError: the folder does not exist, or contains no run.
    """
    folders = [folder for folder in exp_dir.iterdir() if is_record(folder)] if exp_dir.is_dir() else []
    if not folders:
        raise RecordError(f"there are no runs in {exp_dir}; start a run first, or name its folder with --exp-dir")
    return sorted(map(read_facts, folders), key=lambda facts: -facts.started)


def describe_run(facts: RunFacts) -> dict[str, Any]:
    """Return the row of a run in the list, as plain values. The last reward is read from metrics.jsonl."""
    summary = facts.summary
    validation = summary.validation if summary else None
    rewards = _rewards(facts.folder)
    return {
        "run": facts.name,
        "kind": facts.kind,
        "state": facts.state,
        "backbone": facts.backbone,
        "algorithm": facts.algorithm,
        "model": facts.model,
        "started": facts.started,
        "seconds": summary.seconds if summary else None,
        "steps": summary.steps if summary else len(rewards),
        "reward": rewards[-1] if rewards else None,
        "success_before": validation.before.success_rate if validation and validation.before else None,
        "success": validation.after.success_rate if validation and validation.after else None,
        "failed_episodes": summary.episodes.failed if summary else None,
        "note": facts.note.text,
        "tags": list(facts.note.tags),
        "folder": str(facts.folder),
    }


def select_runs(
    runs: Sequence[RunFacts], words: Sequence[str], sort: str, *, show_all: bool
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the list, and the number of hidden runs.

    Args:
        runs: the runs, the latest first.
        words: texts that a row must contain: in its name, kind, state, backbone, algorithm, model, note or tags.
        sort: the field to sort by. Numbers are sorted from the highest, runs without a value come last.
        show_all: whether debug runs, dry runs and renamed earlier runs are listed, too.
    """
    visible = [facts for facts in runs if show_all or not (facts.is_copy or facts.kind in ("debug", "check"))]
    rows = [describe_run(facts) for facts in visible]
    fields = ("run", "kind", "state", "backbone", "algorithm", "model", "note", "tags")
    rows = [row for row in rows if all(any(w.lower() in str(row[f]).lower() for f in fields) for w in words)]
    if sort in ("run", "state"):
        rows.sort(key=lambda row: str(row[sort]))
    else:
        rows.sort(key=lambda row: (row[sort] is None, -(row[sort] or 0)))
    return rows, len(runs) - len(visible)


def runs_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the list of runs as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for name in ("state", "backbone"):
        table.add_column(name, no_wrap=True)
    for name in ("steps", "reward", "success", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("started", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        success = _percent(row["success"])
        if row["success_before"] is not None:
            success = f"{_percent(row['success_before'])} → {success}"
        tags = "".join(f" #{tag}" for tag in row["tags"])
        table.add_row(
            escape(row["run"]),
            f"[{_STYLES[row['state']]}]{row['state']}[/]" if _STYLES[row["state"]] else row["state"],
            escape(str(row["backbone"] or "-")),
            str(row["steps"]),
            "-" if row["reward"] is None else f"{row['reward']:.2f}",
            success,
            "-" if row["seconds"] is None else _duration(row["seconds"]),
            time.strftime("%d %b %H:%M", time.localtime(row["started"])),
            escape(shorten(row["note"], 60) + tags),
        )
    return table


def print_comparison(console: Console, runs: Sequence[RunFacts]) -> None:
    """Print the results of runs side by side, whether their success rates differ beyond noise, and their keys."""
    described = [describe_run(facts) for facts in runs]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for row in described:
        table.add_column(escape(row["run"]), overflow="fold")
    lines: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("state", lambda row: row["state"]),
        ("backbone", lambda row: str(row["backbone"])),
        ("algorithm", lambda row: str(row["algorithm"])),
        ("model", lambda row: shorten(str(row["model"]), 60)),
        ("steps", lambda row: str(row["steps"])),
        ("success before", lambda row: _percent(row["success_before"])),
        ("success after", lambda row: _percent(row["success"])),
        ("last reward", lambda row: "-" if row["reward"] is None else f"{row['reward']:.3f}"),
        ("failed episodes", lambda row: "-" if row["failed_episodes"] is None else str(row["failed_episodes"])),
        ("time", lambda row: "-" if row["seconds"] is None else _duration(row["seconds"])),
    )
    for name, cell in lines:
        table.add_row(name, *(escape(cell(row)) for row in described))
    keys = config_difference({facts.name: facts.folder for facts in runs})
    differing = [row for row in keys if row["key"] not in _NAMES]
    for row in differing:
        table.add_row(
            escape(row["key"].removeprefix("astuner.")), *(escape(shorten(repr(v), 60)) for v in row["values"])
        )
    console.print(table)
    for other in runs[1:]:
        console.print(escape(_difference_line(runs[0], other)), soft_wrap=True)


def _difference_line(first: RunFacts, other: RunFacts) -> str:
    ends = [_validation_after(facts) for facts in (first, other)]
    names = f"{other.name} and {first.name}"
    if ends[0] is None or ends[1] is None:
        return f"{names}: no success rates to compare"
    rates = [end.success_rate or 0.0 for end in ends if end is not None]
    low, high = difference_interval(rates[0], ends[0].episodes, rates[1], ends[1].episodes)
    beyond = "differ beyond noise" if low > 0 or high < 0 else "do not differ beyond noise"
    points = f"{100 * (rates[1] - rates[0]):+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{names} {beyond}: {points}"


def _validation_after(facts: RunFacts) -> ValidationSummary | None:
    after = facts.summary.validation.after if facts.summary else None
    return after if after and after.success_rate is not None and after.episodes else None


def delete_run(folder: Path) -> None:
    """Delete the record of a run, with its checkpoints and its model.

    Raises:
        RecordError: a live run writes it, or it cannot be deleted.
    """
    lock = FolderLock(folder)
    try:
        if not is_record(folder):
            raise RecordError(f"{folder} is no longer a run record")
        # The file that makes the folder a record goes last, so that an interrupted deletion can be repeated.
        for entry in sorted(folder.iterdir(), key=lambda path: path.name == "environment.json"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        folder.rmdir()
    except OSError as error:
        raise RecordError(f"cannot delete {folder}: {error.strerror or error}") from error
    finally:
        lock.release()
    (folder.parent / f".{folder.name}.lock").unlink(missing_ok=True)


def folder_size(folder: Path) -> int:
    """Return the size of the files in a folder, in bytes."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _rewards(folder: Path) -> list[float]:
    try:
        rows = read_metrics(folder, lambda _: None)
    except RecordError:
        return []
    return [reward for row in rows if (reward := row.metrics.get("reward/mean")) is not None]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"

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
from astuner.launcher.console import plain_table
from astuner.run_record.folder import FolderLock, is_record
from astuner.run_record.recorded_run import (
    RecordedRun,
    describe_result,
    describe_run,
    result_difference,
    setting_differences,
)
from astuner.run_record.verdict import OUTCOME_WORDS
from astuner.system.clock import duration_text

_STYLES = {"running": "green", "finished": "", "failed": "bold red", "stopped": "yellow"}


def read_runs(exp_dir: Path) -> list[RecordedRun]:
    """Return the runs in a folder, the latest first; `RecordError` if the folder does not exist, or contains no run."""
    folders = [folder for folder in exp_dir.iterdir() if is_record(folder)] if exp_dir.is_dir() else []
    if not folders:
        raise RecordError(f"there are no runs in {exp_dir}; start a run first, or name its folder with --exp-dir")
    return sorted(map(RecordedRun, folders), key=lambda facts: -facts.started)


def select_runs(
    runs: Sequence[RecordedRun], words: Sequence[str], sort: str, *, show_all: bool
) -> tuple[list[dict[str, Any]], int]:
    """Return the list's rows, and the number of hidden runs.

    Args:
        runs: the runs, the latest first.
        words: texts that a row must contain, in one of the fields below.
        sort: the field to sort by. Numbers are sorted from the highest, runs without a value come last.
        show_all: whether debug runs, dry runs and renamed earlier runs are listed, too.
    """
    visible = [facts for facts in runs if show_all or not (facts.is_copy or facts.kind in ("debug", "check"))]
    rows = [describe_run(facts) for facts in visible]
    fields = ("run", "kind", "state", "outcome", "backbone", "algorithm", "model", "note", "tags")
    rows = [row for row in rows if all(any(w.lower() in str(row[f]).lower() for f in fields) for w in words)]
    if sort in ("run", "state"):
        rows.sort(key=lambda row: str(row[sort]))
    else:
        rows.sort(key=lambda row: (row[sort] is None, -(row[sort] or 0)))
    return rows, len(runs) - len(visible)


def runs_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the list of runs as a table."""
    table = plain_table()
    table.add_column("run", overflow="fold", min_width=12)
    for name in ("state", "verdict"):
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
            OUTCOME_WORDS.get(row["outcome"], "-"),
            str(row["steps"]),
            "-" if row["reward"] is None else f"{row['reward']:.2f}",
            success,
            "-" if row["seconds"] is None else duration_text(row["seconds"]),
            time.strftime("%d %b %H:%M", time.localtime(row["started"])),
            escape(shorten(row["note"], 60) + tags),
        )
    return table


def print_comparison(console: Console, runs: Sequence[RecordedRun]) -> None:
    """Print the results of runs side by side, whether their success rates differ beyond noise, and their keys."""
    described = [describe_result(facts) for facts in runs]
    table = plain_table()
    table.add_column("")
    for row in described:
        table.add_column(escape(row["run"]), overflow="fold")
    lines: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("state", lambda row: row["state"]),
        ("verdict", lambda row: OUTCOME_WORDS[row["outcome"]]),
        ("backbone", lambda row: str(row["backbone"])),
        ("algorithm", lambda row: str(row["algorithm"])),
        ("model", lambda row: shorten(str(row["model"]), 60)),
        ("steps", lambda row: str(row["steps"])),
        ("success before", lambda row: _rate(row["success_before"], row["interval_before"])),
        ("success after", lambda row: _rate(row["success"], row["interval"])),
        ("last reward", lambda row: "-" if row["reward"] is None else f"{row['reward']:.3f}"),
        ("KL to the start", lambda row: "-" if row["kl_start"] is None else f"{row['kl_start']:.3g}"),
        ("trained tokens", lambda row: "-" if row["tokens"] is None else f"{row['tokens']['trained']:,}"),
        ("failed episodes", lambda row: "-" if row["failed_episodes"] is None else str(row["failed_episodes"])),
        ("time", lambda row: "-" if row["seconds"] is None else duration_text(row["seconds"])),
    )
    for name, cell in lines:
        table.add_row(name, *(escape(cell(row)) for row in described))
    for row in setting_differences(runs):
        table.add_row(
            escape(row["key"].removeprefix("astuner.")), *(escape(shorten(repr(v), 60)) for v in row["values"])
        )
    console.print(table)
    for other in runs[1:]:
        console.print(escape(result_difference(runs[0], other)), soft_wrap=True)


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


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _rate(rate: float | None, interval: Sequence[float] | None) -> str:
    if rate is None or interval is None:
        return _percent(rate)
    return f"{rate:.0%} ({interval[0]:.0%} to {interval[1]:.0%})"

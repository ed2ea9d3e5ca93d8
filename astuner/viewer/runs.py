"""The runs of a folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from astuner.errors import RecordError
from astuner.run_record import is_being_written, is_record, read_summary


class Runs:
    """The runs under one folder, looked up anew each time, as new ones come while the page is open."""

    def __init__(self, folder: Path) -> None:
        """Look at `folder`: a run's own, or one that holds those of runs, or may get some yet.

        Raises:
            RecordError: there is no such folder.
        """
        self._folder = folder
        self._known: dict[Path, object] = {}
        self._lock = threading.Lock()
        if not folder.is_dir():
            raise RecordError(
                f"{str(folder)!r} is no folder: expected a run's folder, or a folder of runs such as launcher_record; "
                "give another one (astuner view DIR), or start a run first"
            )

    def all(self) -> dict[str, Path]:
        """Return the folders of the runs by name, the latest first."""
        with self._lock:
            if self._started(self._folder) is not None:
                return {self._folder.resolve().name: self._folder}
            try:
                started = {folder: self._started(folder) for folder in self._folder.iterdir()}
            except OSError:
                return {}
            self._known = {folder: known for folder, known in self._known.items() if folder in started}
        found = sorted(((since, folder) for folder, since in started.items() if since is not None), reverse=True)
        return {folder.name: folder for _, folder in found}

    def folder(self, name: str) -> Path:
        """Return the folder of run `name`.

        Raises:
            RecordError: there is none.
        """
        runs = self.all()
        if name not in runs:
            raise RecordError(f"there is no run {name[:80]!r}; there are: {', '.join(list(runs)[:10])}")
        return runs[name]

    def _started(self, folder: Path) -> float | None:
        """Return when the run in `folder` began, None where it holds none; reads its environment only where changed."""
        try:
            status = (folder / "environment.json").stat()
        except OSError:
            return None
        version = status.st_mtime_ns, status.st_size, status.st_ino
        if self._known.get(folder) != version:
            if not is_record(folder):
                return None
            self._known[folder] = version
        return status.st_mtime


def run_state(folder: Path) -> str:
    """Return `finished`, `running` or `stopped`."""
    if (folder / "summary.json").exists():
        return "finished"
    return "running" if is_being_written(folder) else "stopped"


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run, None where there is none to read."""
    try:
        return read_summary(folder).model_dump()
    except RecordError:
        return None


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run as `section.key` to value; empty where it cannot be read."""
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8", errors="replace"))
        return dict(_flat(tree, "")) if isinstance(tree, Mapping) else {}
    # What it raises for a date that is none has no type of its own.
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return {}


def config_difference(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value that each run has; None where it has none."""
    configs = {name: config_of(folder) for name, folder in folders.items()}
    rows = []
    for key in sorted({key for config in configs.values() for key in config}):
        values = [config.get(key) for config in configs.values()]
        # As text: 1, 1.0 and true are equal in Python, and NaN is not equal to itself.
        if len(set(map(repr, values))) > 1:
            rows.append({"key": key, "values": values})
    return rows


def _flat(tree: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        # An empty one is a value: that it is there may be what differs.
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found

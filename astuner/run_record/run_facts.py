"""Facts about a whole run, for lists and comparisons of runs: state, kind, configuration, summary and note."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from astuner.errors import RecordError
from astuner.run_record.files import dump_json, write_atomically
from astuner.run_record.folder import is_being_written
from astuner.run_record.summary import RunSummary, read_summary

RunState = Literal["running", "finished", "failed", "stopped"]
RunKind = Literal["training", "evaluation", "debug", "check"]

_NOTE = "note.json"
_ENVIRONMENT = "environment.json"
_KINDS: dict[str, RunKind] = {"-eval": "evaluation", "-debug": "debug", "-check": "check"}
_COPY = re.compile(r"\.[0-9]+$")


class RunNote(BaseModel):
    """The note of a user on a run, in `note.json`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str = ""
    """The note."""
    tags: tuple[str, ...] = ()
    """Words that group runs."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run in a folder. Files that are missing or damaged give empty values.

    Attributes:
        folder: the folder of the run.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name

    @property
    def kind(self) -> RunKind:
        """The run's kind, from its folder's suffix."""
        base = _COPY.sub("", self.name)
        return next((kind for suffix, kind in _KINDS.items() if base.endswith(suffix)), "training")

    @property
    def is_copy(self) -> bool:
        """Whether a later run of the same experiment has renamed the folder to `{name}.1`, `.2`, and so on."""
        return _COPY.search(self.name) is not None

    @property
    def state(self) -> RunState:
        """The state of the run; see `run_state`."""
        return run_state(self.folder, self.summary)

    @cached_property
    def started(self) -> float:
        """Start of the run in seconds since the epoch; 0 if unknown."""
        try:
            return (self.folder / _ENVIRONMENT).stat().st_mtime
        except OSError:
            return 0.0

    @cached_property
    def summary(self) -> RunSummary | None:
        """The summary; None before the end of the run."""
        return summary_of(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as dotted keys and values."""
        return config_of(self.folder)

    @cached_property
    def note(self) -> RunNote:
        """The note of the user."""
        return read_note(self.folder)

    @property
    def algorithm(self) -> str | None:
        """The algorithm of the run."""
        return self.config.get("astuner.trainer_common.algorithm.adv_estimator")

    @property
    def model(self) -> str | None:
        """The starting model, or the evaluated one."""
        return self.config.get("astuner.model.path")

    @property
    def backbone(self) -> str | None:
        """The backbone of the run."""
        return self.config.get("astuner.backbone")


def read_facts(folder: Path) -> RunFacts:
    """Return the facts about the run in `folder`, which are read when they are used."""
    return RunFacts(folder)


def run_state(folder: Path, summary: RunSummary | None) -> RunState:
    """Return the state of the run in `folder` with this `summary`, which is None if there is none.

    `finished` and `failed` runs have a summary; in a failed one, all episodes failed. A `stopped` run was interrupted,
    killed, or ended by an error.
    """
    if summary is not None:
        episodes = summary.episodes
        return "failed" if episodes.failed and not episodes.ok + episodes.dropped else "finished"
    if (folder / "summary.json").exists():
        return "finished"
    return "running" if is_being_written(folder) else "stopped"


def summary_of(folder: Path) -> RunSummary | None:
    """Return the summary of a run; None if it cannot be read."""
    try:
        return read_summary(folder)
    except RecordError:
        return None


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run as dotted keys and values; empty if it cannot be read."""
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8", errors="replace"))
        return dict(_flatten(tree, "")) if isinstance(tree, Mapping) else {}
    # AttributeError: PyYAML raises it for an invalid date.
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return {}


def environment_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's `environment.json`: versions, machine, command line; empty if it cannot be read."""
    return _read_environment(folder / _ENVIRONMENT)


def search_folders_of(folder: Path) -> list[Path]:
    """Return the folders to which relative paths in a run's configuration refer, in the order of the search.

    They are the run's working directory and the folder of its YAML file, as far as they are recorded.
    """
    environment = environment_of(folder)
    found = (environment.get(name) for name in ("working_directory", "config_dir"))
    return [Path(path) for path in found if isinstance(path, str)]


def environments_of(folder: Path) -> list[dict[str, Any]]:
    """Return the different environments of a run's processes; more than one if it was resumed in another one.

    An environment that cannot be read is empty. The last one is that of `environment_of`.
    """
    path = folder / _ENVIRONMENT
    earlier = folder.glob(f"{path.stem}.*{path.suffix}")
    return [_read_environment(file) for file in (*sorted(earlier), path)]


def _read_environment(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def config_difference(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run; None for a missing key."""
    configs = {name: config_of(folder) for name, folder in folders.items()}
    rows = []
    for key in sorted({key for config in configs.values() for key in config}):
        values = [config.get(key) for config in configs.values()]
        # Compared as text: 1, 1.0 and true are equal in Python, and NaN is not equal to itself.
        if len(set(map(repr, values))) > 1:
            rows.append({"key": key, "values": values})
    return rows


def _flatten(tree: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    items = []
    for key, value in tree.items():
        # An empty mapping is a value: its presence may be the difference between two runs.
        if isinstance(value, Mapping) and value:
            items += _flatten(value, f"{prefix}{key}.")
        else:
            items.append((f"{prefix}{key}", value))
    return items


def read_note(folder: Path) -> RunNote:
    """Return the note of a run; an empty one if there is none or it cannot be read."""
    try:
        return RunNote.model_validate(json.loads((folder / _NOTE).read_bytes()))
    except (OSError, ValueError, ValidationError, RecursionError):
        return RunNote()


def write_note(folder: Path, note: RunNote) -> None:
    """Write the note of a run.

    Raises:
        RecordError: If the note cannot be written.
    """
    write_atomically(folder / _NOTE, dump_json(note.model_dump()) + b"\n")

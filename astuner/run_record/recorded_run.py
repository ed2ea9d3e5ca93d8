"""A recorded run: its lookup by name, its state, kind, configuration, summary and note, for lists and comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from astuner.errors import RecordError, did_you_mean, short_repr, shorten
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.files import dump_json, write_atomically
from astuner.run_record.folder import is_being_written, is_record
from astuner.run_record.metrics import MetricsRow, difference_interval, read_metrics, success_interval
from astuner.run_record.summary import RunSummary, ValidationSummary, read_summary
from astuner.run_record.verdict import Outcome, run_verdict

RunState = Literal["running", "finished", "failed", "stopped"]
RunKind = Literal["training", "evaluation", "debug", "check"]

_NOTE = "note.json"
_ENVIRONMENT = "environment.json"
_KINDS: dict[str, RunKind] = {"-eval": "evaluation", "-debug": "debug", "-check": "check"}
_COPY = re.compile(r"\.[0-9]+$")
# Keys that differ between any two runs.
_NAMES = ("astuner.experiment_name", "astuner.experiment_dir")
_MAX_RUNS_LISTED = 10
_MAX_EPISODES_LISTED = 5
# A comparison with every id of a long run would take seconds.
_MAX_IDS_COMPARED = 2000


class RunNote(BaseModel):
    """The note of a user on a run, in `note.json`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    text: str = ""
    """The note."""
    tags: tuple[str, ...] = ()
    """Words that group runs."""


@dataclass(frozen=True)
class RecordedRun:
    """A run in a folder. Its files are read when they are used; missing and damaged ones give empty values."""

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
        """The start in seconds since the epoch; 0 if unknown."""
        try:
            return (self.folder / _ENVIRONMENT).stat().st_mtime
        except OSError:
            return 0.0

    @cached_property
    def summary(self) -> RunSummary | None:
        """The summary; None if it cannot be read, as before the end of the run."""
        try:
            return read_summary(self.folder)
        except RecordError:
            return None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration as dotted keys and values; empty if it cannot be read."""
        try:
            tree = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8", errors="replace"))
            return dict(_flatten(tree, "")) if isinstance(tree, Mapping) else {}
        # AttributeError: PyYAML raises it for an invalid date.
        except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
            return {}

    @cached_property
    def note(self) -> RunNote:
        """The note of the user; an empty one if there is none or it cannot be read."""
        try:
            return RunNote.model_validate(json.loads((self.folder / _NOTE).read_bytes()))
        except (OSError, ValueError, ValidationError, RecursionError):
            return RunNote()

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


def search_folders_of(folder: Path) -> list[Path]:
    """Return the folders to which relative paths in a run's configuration refer, in the order of the search.

    They are the run's working directory and the folder of its YAML file, as far as they are recorded.
    """
    environment = environments_of(folder)[-1]
    found = (environment.get(name) for name in ("working_directory", "config_dir"))
    return [Path(path) for path in found if isinstance(path, str)]


def environments_of(folder: Path) -> list[dict[str, Any]]:
    """Return the different environments of a run's processes; more than one if it was resumed in another one.

    Each has versions, machine and command line. One that cannot be read is empty. The last one is the latest.
    """
    path = folder / _ENVIRONMENT
    contents: list[object] = []
    for file in (*sorted(folder.glob(f"{path.stem}.*{path.suffix}")), path):
        try:
            contents.append(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError):
            contents.append(None)
    return [content if isinstance(content, dict) else {} for content in contents]


def config_difference(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run; None for a missing key."""
    configs = {name: RecordedRun(folder).config for name, folder in folders.items()}
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


def write_note(folder: Path, note: RunNote) -> None:
    """Write the note of a run; `RecordError` if that fails."""
    write_atomically(folder / _NOTE, dump_json(note.model_dump()) + b"\n")


def describe_run(facts: RecordedRun) -> dict[str, Any]:
    """Return the row of a run in the list, as plain values. The last reward is read from metrics.jsonl."""
    return _describe(facts, _metrics(facts))


def describe_result(facts: RecordedRun) -> dict[str, Any]:
    """Return a run's row in a comparison: its row in the list, intervals, KL, tokens and the verdict.

    Returns:
        The values of `describe_run`, and: `interval_before` and `interval`, the 95% intervals of the success rates,
        each two shares or None; `episodes_before` and `episodes_after`, the episodes of these validations;
        `kl_start` and `kl_update`, the last values in nats per token; `tokens`, the counts of the summary; `outcome`,
        `verdict` and `suggestions`, as in `RunVerdict`.
    """
    rows = _metrics(facts)
    summary = facts.summary
    validation = summary.validation if summary else None
    before, after = (validation.before, validation.after) if validation else (None, None)
    verdict = run_verdict(summary, rows)
    return _describe(facts, rows) | {
        "interval_before": _interval(before),
        "interval": _interval(after),
        "episodes_before": before.episodes if before else None,
        "episodes_after": after.episodes if after else None,
        "kl_start": _last(rows, "loss/kl"),
        "kl_update": _last(rows, "kl/update"),
        "tokens": summary.tokens.model_dump() if summary else None,
        "outcome": verdict.outcome,  # also of a run that has not finished
        "verdict": list(verdict.lines),
        "suggestions": list(verdict.suggestions),
    }


def run_outcome(facts: RecordedRun, rows: Sequence[MetricsRow] | None = None) -> Outcome | None:
    """Return whether a finished run's model learned; None if the run has not finished, or does not train.

    Args:
        rows: the run's metrics, if they have been read.
    """
    if facts.summary is None or not facts.summary.steps or facts.kind != "training":
        return None
    return run_verdict(facts.summary, _metrics(facts) if rows is None else rows).outcome


def result_difference(first: RecordedRun, other: RecordedRun) -> str:
    """Return a sentence that states whether the final success rates of two runs differ beyond noise."""
    names = f"{other.name} and {first.name}"
    measured = [
        (after.success_rate, after.episodes)
        for run in (first, other)
        if run.summary and (after := run.summary.validation.after) and after.success_rate is not None and after.episodes
    ]
    if len(measured) < 2:
        return f"{names}: no success rates to compare"
    rates = [rate for rate, _ in measured]
    low, high = difference_interval(*measured[0], *measured[1])
    beyond = "differ beyond noise" if low > 0 or high < 0 else "do not differ beyond noise"
    points = f"{100 * (rates[1] - rates[0]):+.1f} points, 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{names} {beyond}: {points}"


def setting_differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the configuration keys whose values differ between runs, without the runs' names."""
    rows = config_difference({facts.name: facts.folder for facts in runs})
    return [row for row in rows if row["key"] not in _NAMES]


def _describe(facts: RecordedRun, rows: Sequence[MetricsRow]) -> dict[str, Any]:
    summary = facts.summary
    validation = summary.validation if summary else None
    rewards = [reward for row in rows if (reward := row.metrics.get("reward/mean")) is not None]
    return {
        "run": facts.name,
        "kind": facts.kind,
        "state": facts.state,
        "outcome": run_outcome(facts, rows),
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


def _metrics(facts: RecordedRun) -> list[MetricsRow]:
    try:
        return read_metrics(facts.folder, lambda _: None)
    except RecordError:
        return []


def _last(rows: Sequence[MetricsRow], name: str) -> float | None:
    return next((value for row in reversed(rows) if (value := row.metrics.get(name)) is not None), None)


def _interval(entry: ValidationSummary | None) -> list[float] | None:
    if entry is None or entry.success_rate is None or not entry.episodes:
        return None
    return list(success_interval(entry.success_rate, entry.episodes))


def find_run(name: str, exp_dir: Path) -> Path:
    """Return the folder of the run `name`, which is a folder or an experiment's name in the folder `exp_dir`.

    Raises:
        RecordError: If there is no such run. The message lists the existing runs.
    """
    for folder in (Path(name), exp_dir / name):
        if is_record(folder):
            return folder
    runs = [folder for folder in exp_dir.iterdir() if is_record(folder)] if exp_dir.is_dir() else []
    hint = "there are no runs yet"
    if runs:
        # The latest runs first: users rarely look for old ones.
        names = [folder.name for folder in sorted(runs, key=lambda folder: -folder.stat().st_mtime)]
        more = f" and {len(names) - _MAX_RUNS_LISTED} more" if len(names) > _MAX_RUNS_LISTED else ""
        hint = did_you_mean(name, names, "did you mean {}? ")
        hint += f"existing runs: {', '.join(names[:_MAX_RUNS_LISTED])}{more}"
    raise RecordError(
        f"{short_repr(name)} is not a run; give a run's folder, or its name under {exp_dir} (--exp-dir); {hint}"
    )


def find_episode(name: str, entries: Sequence[EpisodeEntry]) -> EpisodeEntry:
    """Return the episode with the id `name`, or the only episode whose id starts with `name`.

    Raises:
        RecordError: If there is no such episode, or there are several. The message lists similar ids.
    """
    exact = [entry for entry in entries if entry.episode_id == name]
    if exact:
        return exact[-1]
    matches = [entry for entry in entries if entry.episode_id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RecordError(
            f"{len(matches)} episodes of the run start with {short_repr(name)}; give more of the id: "
            f"{_list_ids(matches)}"
        )
    containing = [entry for entry in entries if name in entry.episode_id]
    ids = [entry.episode_id for entry in entries[:_MAX_IDS_COMPARED]]
    if not entries:
        hint = "no episode is recorded yet"
    elif containing:
        hint = f"ids that contain it: {_list_ids(containing)}"
    elif near := get_close_matches(name, ids, _MAX_EPISODES_LISTED, cutoff=0.5):
        hint = f"similar ids: {', '.join(map(shorten, near))}"
    else:
        hint = f"examples of its ids: {_list_ids(entries)}"
    raise RecordError(f"the run has no episode {short_repr(name)}; {hint}")


def _list_ids(entries: Sequence[EpisodeEntry]) -> str:
    more = ", …" if len(entries) > _MAX_EPISODES_LISTED else ""
    return ", ".join(shorten(entry.episode_id) for entry in entries[:_MAX_EPISODES_LISTED]) + more


def file_in_run(folder: Path, path: str) -> Path:
    """Return the file with the relative `path` in a run's `folder`, with links resolved.

    Raises:
        RecordError: If the path is invalid or outside the run's folder.
    """
    try:
        file = (folder / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise RecordError(f"the index names an invalid file: {path[:80]!r} ({error})") from error
    if not file.is_relative_to(folder.resolve()):
        raise RecordError("the index names a file outside the run's folder, which is not opened")
    return file

"""Rows from Hugging Face data sets: on the hub, in a local folder in hub layout, or saved by `save_to_disk`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import HuggingFaceConfig
from astuner.errors import ConfigError, TaskDataError
from astuner.task_reader.dataset_file import find_path
from astuner.task_reader.quiet_datasets import LOAD_ERRORS, quiet_datasets
from astuner.task_reader.rows import Row, Split

_SECTION = "astuner.task_reader.huggingface_dat_repo"


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to read `dataset_path`: a hub name or a folder, and the subset."""

    place: str
    subset: str | None

    def __str__(self) -> str:
        return f"{self.place} (subset {self.subset})" if self.subset else self.place


def repo_splits(config: HuggingFaceConfig, base_dir: Path) -> tuple[Split, Split | None]:
    """Open the training and the validation split.

    `dataset_path` is, in this order: a folder that exists; a folder and its subset; a hub name; a hub name and its
    subset. `gsm8k/main` may be either of the last two, so both are tried. Of several subsets of which none is named,
    `main` is read.

    Args:
        config: section `task_reader.huggingface_dat_repo`.
        base_dir: where a relative folder is looked for after the working directory.

    Raises:
        ConfigError: the subset is named twice.
        TaskDataError: there is no such data set, subset or split, or the hub cannot be reached.
    """
    readings = _readings(config, base_dir)
    reasons: list[str] = []
    offline = False
    with quiet_datasets() as datasets:
        for reading in readings:
            try:
                training = _load(datasets, reading, config.training_split)
            except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
                reasons.append(f"  {reading}, split {config.training_split}: {error}")
                offline = offline or isinstance(error, ConnectionError)
                if reading.subset is None and "Config name is missing" in str(error) and "'main'" in str(error):
                    readings.append(_Reading(reading.place, "main"))
                    logger.warning("{} has several subsets and none is named; reading main.", reading)
                continue
            validation = None
            if config.validation_split is not None:
                validation = _validation(datasets, reading, config.validation_split)
            return training, validation
    hint = "\nOnline it is fetched once and kept; offline, set dataset_path to a local folder." if offline else ""
    raise TaskDataError(
        f"{_SECTION}.dataset_path {config.dataset_path!r} cannot be read:\n" + "\n".join(reasons) + hint
    )


def _readings(config: HuggingFaceConfig, base_dir: Path) -> list[_Reading]:
    path, subset = config.dataset_path.rstrip("/"), config.dataset_name
    folder = find_path(path, base_dir)
    if folder.is_dir():
        return [_Reading(str(folder), subset)]
    if folder.is_file():
        raise TaskDataError(f"{folder} is a file; use task_reader.type dataset_file for it.")
    parts = path.split("/")
    if len(parts) == 3 and subset is not None:
        raise ConfigError(
            f"{_SECTION}: dataset_path {path!r} names the subset {parts[2]!r} and dataset_name {subset!r};"
            " name it in one place."
        )
    readings = []
    if len(parts) > 1 and subset is None and parts[-2] not in ("", ".", ".."):
        parent = find_path("/".join(parts[:-1]), base_dir)
        if parent.is_dir():
            readings.append(_Reading(str(parent), parts[-1]))
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){0,2}", path):
        if len(parts) <= 2:
            readings.append(_Reading(path, subset))
        if len(parts) >= 2 and subset is None:
            readings.append(_Reading("/".join(parts[:-1]), parts[-1]))
    if not readings:
        raise TaskDataError(f"{_SECTION}.dataset_path: no folder {folder}.{_near(folder)}")
    return readings


def _near(folder: Path) -> str:
    names = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
    near = get_close_matches(folder.name, names, 3)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _validation(datasets: Any, reading: _Reading, split: str) -> Split:
    try:
        return _load(datasets, reading, split)
    except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
        raise TaskDataError(
            f"{reading} has no validation split {split!r}: {error}\n"
            f"Set {_SECTION}.validation_split to a split that it has, or to null for no validation."
        ) from error


def _load(datasets: Any, reading: _Reading, split: str) -> Split:
    folder = Path(reading.place)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        rows = _saved(datasets, reading, split)
    else:
        rows = datasets.load_dataset(reading.place, reading.subset, split=split)
    return Split(f"{reading} [{split}]", _numbered(rows))


def _saved(datasets: Any, reading: _Reading, split: str) -> Iterable[object]:
    """A split of what `save_to_disk` wrote; a single data set knows the name of the split it was."""
    saved = datasets.load_from_disk(reading.place)
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if reading.subset is not None:
        raise ValueError("a folder written by save_to_disk has no subsets")
    if split not in splits:
        raise ValueError(f"Unknown split {split!r}. Should be one of {list(splits)}.")
    rows: Iterable[object] = splits[split]
    return rows


def _numbered(rows: Iterable[object]) -> Iterable[Row]:
    return (Row(f"row {number}", content) for number, content in enumerate(rows, 1))

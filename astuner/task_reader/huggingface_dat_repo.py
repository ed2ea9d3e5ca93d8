"""Reads rows from Hugging Face data sets: on the hub, in a folder in hub layout, or written by `save_to_disk`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import HuggingFaceConfig
from astuner.errors import ConfigError, TaskDataError, did_you_mean, message_of, short_repr
from astuner.task_reader.dataset_file import LOAD_ERRORS, find_path, quiet_datasets
from astuner.task_reader.tasks import DatasetRow, DatasetSplit

_SECTION = "astuner.task_reader.huggingface_dat_repo"


@dataclass(frozen=True, slots=True)
class _Location:
    """An interpretation of `dataset_path`: a hub name or a folder, and a subset."""

    path: str
    subset: str | None

    def __str__(self) -> str:
        return f"{self.path} (subset {self.subset})" if self.subset else self.path


def repo_splits(config: HuggingFaceConfig, base_dir: Path) -> tuple[DatasetSplit, DatasetSplit | None]:
    """Open the training and the validation split.

    `dataset_path` is interpreted as the first of these that exists: a folder; a folder and a subset; a hub name; a hub
    name and a subset. `gsm8k/main` can be either of the last two, so both are tried. If the data set has several
    subsets and none is specified, `main` is read.

    Args:
        config: section `task_reader.huggingface_dat_repo`.
        base_dir: the folder for relative paths that do not exist in the working directory.

    Raises:
        ConfigError: the subset is specified twice.
        TaskDataError: the data set, subset or split does not exist, or the hub cannot be reached.
    """
    locations = _locations(config, base_dir)
    reasons: list[str] = []
    offline = False
    with quiet_datasets() as datasets:
        for location in locations:
            try:
                training = _load(datasets, location, config.training_split)
            except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
                reasons.append(f"  {location}, split {config.training_split}: {message_of(error)}")
                offline = offline or isinstance(error, ConnectionError)
                if location.subset is None and "Config name is missing" in str(error) and "'main'" in str(error):
                    locations.append(_Location(location.path, "main"))
                    logger.warning("{} has several subsets; reading main (dataset_name selects another one)", location)
                continue
            validation = None
            if config.validation_split is not None:
                try:
                    validation = _load(datasets, location, config.validation_split)
                except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
                    raise TaskDataError(
                        f"{location} has no validation split {config.validation_split!r}: {message_of(error)}\n"
                        f"Set {_SECTION}.validation_split to an existing split, or to null for no validation."
                    ) from error
            return training, validation
    hint = "\nOnline, it is downloaded once and cached; offline, set dataset_path to a local folder." if offline else ""
    raise TaskDataError(
        f"{_SECTION}.dataset_path {config.dataset_path!r} cannot be read:\n" + "\n".join(reasons) + hint
    )


def _locations(config: HuggingFaceConfig, base_dir: Path) -> list[_Location]:
    path, subset = config.dataset_path.rstrip("/"), config.dataset_name
    folder = find_path(path, base_dir)
    if folder.is_dir():
        return [_Location(str(folder), subset)]
    if folder.is_file():
        raise TaskDataError(f"{folder} is a file; use task_reader.type dataset_file.")
    parts = path.split("/")
    if len(parts) == 3 and subset is not None:
        raise ConfigError(
            f"{_SECTION}: dataset_path {path!r} names the subset {parts[2]!r} and dataset_name {subset!r};"
            " specify it in one place."
        )
    locations = []
    if len(parts) > 1 and subset is None and parts[-2] not in ("", ".", ".."):
        parent = find_path("/".join(parts[:-1]), base_dir)
        if parent.is_dir():
            locations.append(_Location(str(parent), parts[-1]))
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*){0,2}", path):
        if len(parts) <= 2:
            locations.append(_Location(path, subset))
        if len(parts) >= 2 and subset is None:
            locations.append(_Location("/".join(parts[:-1]), parts[-1]))
    if not locations:
        names = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, names, " Did you mean {}?", show=str, most=3)
        raise TaskDataError(f"{_SECTION}.dataset_path: no folder {folder}.{hint}")
    return locations


def _load(datasets: Any, location: _Location, split: str) -> DatasetSplit:
    folder = Path(location.path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        rows = _saved(datasets, location, split)
    else:
        rows = datasets.load_dataset(location.path, location.subset, split=split)
    numbered = (DatasetRow(f"row {number}", content) for number, content in enumerate(rows, 1))
    return DatasetSplit(f"{location} [{split}]", numbered)


def _saved(datasets: Any, location: _Location, split: str) -> Iterable[object]:
    """Return a split's rows that `save_to_disk` wrote; a single data set stores the name of its split."""
    saved = datasets.load_from_disk(location.path)
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if location.subset is not None:
        raise ValueError("a folder written by save_to_disk has no subsets")
    if split not in splits:
        raise ValueError(f"Unknown split {split!r}. Should be one of {short_repr(list(splits))}.")
    rows: Iterable[object] = splits[split]
    return rows

"""Reads the configured training and validation tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from loguru import logger

from astuner.config.data import (
    DatasetFileConfig,
    EnvServiceConfig,
    HuggingFaceConfig,
    MixturePart,
    TaskReaderConfig,
    part_names,
)
from astuner.doors import through_door
from astuner.env_service.addresses import EnvServiceAddress
from astuner.errors import ConfigError, TaskDataError, shorten
from astuner.schema import Task, TaskSet
from astuner.task_reader.dataset_file import file_splits
from astuner.task_reader.task_reader_base import RandomDummyReader, SeedReader, load_reader, tasks_of
from astuner.task_reader.tasks import DatasetSplit, make_tasks

_PROBLEMS_SHOWN = 10
_PLACES_SHOWN = 3


def read_tasks(
    config: TaskReaderConfig,
    *,
    base_dir: Path,
    search: Sequence[Path],
    transcripts: bool = False,
    env_service: EnvServiceAddress | None = None,
    section: str = "astuner.task_reader",
) -> TaskSet:
    """Read the training and validation tasks of section `task_reader`. `apply_filters` then applies its filters.

    Args:
        config: the section.
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->Name`.
        transcripts: the rows are conversations for supervised training. Each must have chat messages, at least one of
            them from the assistant; they become `Task.init_messages`. `main_query` is "", and `tools`, if a row has
            them, are in `metadata`.
        env_service: the environment service that the run has started.
        section: the name of the section, for messages.

    Returns:
        The tasks, in the order of their rows; ids are unique within a split. In a mixture, the tasks of a reader are
        together, and their ids begin with the name of the reader.

    Raises:
        ConfigError: there is no path, a subset is specified twice, or an environment has no transcripts.
        PluginError: `package.module->Name` cannot be loaded, or a reader of the user cannot be created.
        TaskDataError: a source or a row cannot be read, different rows have the same id, or there is no training task.
    """
    if config.type != "mixture":
        return _read_source(config, section, base_dir, search, transcripts, env_service)
    parts = dict(zip(part_names(config.mixture), config.mixture, strict=True))
    sets = {}
    for index, (name, part) in enumerate(parts.items()):
        key = f"{section}.mixture.{index}"
        sets[name] = _read_source(part, key, base_dir, search, transcripts, env_service)
    return TaskSet(
        training=tuple(_from_source(task, name) for name, tasks in sets.items() for task in tasks.training),
        validation=tuple(_from_source(task, name) for name, tasks in sets.items() for task in tasks.validation),
        skipped_rows=sum(tasks.skipped_rows for tasks in sets.values()),
        weights={name: part.weight for name, part in parts.items()},
    )


def _from_source(task: Task, name: str) -> Task:
    return replace(task, task_id=f"{name}/{task.task_id}", source=name)


def _read_source(
    config: TaskReaderConfig | MixturePart,
    key: str,
    base_dir: Path,
    search: Sequence[Path],
    transcripts: bool,
    env_service: EnvServiceAddress | None,
) -> TaskSet:
    """Read the tasks of one reader; `key` is the name of its section."""
    section: DatasetFileConfig | HuggingFaceConfig
    if config.type == "dataset_file":
        section = config.dataset_file
        training_split, validation_split = file_splits(section, base_dir, search)
    elif config.type == "huggingface_dat_repo":
        section = config.huggingface_dat_repo
        training_split, validation_split = through_door("tasks", config.type)(section, base_dir)
    elif config.type == "random_dummy":
        return tasks_of(RandomDummyReader(config.random_dummy, transcripts=transcripts), config.type, transcripts)
    elif config.type == "seeds":
        if transcripts:
            raise _no_transcripts("a seed", key)
        return tasks_of(SeedReader(config.count, config.validation_count, config.first_seed), config.type, transcripts)
    elif "->" in config.type:
        return tasks_of(load_reader(config.type, config.options, search), config.type, transcripts)
    else:
        return _env_tasks(config.env_service, key, transcripts, env_service)
    section_key = f"{key}.{config.type}"
    training, skipped = _read(training_split, section, section_key, transcripts)
    if not training:
        raise TaskDataError(f"{training_split.source}: no training tasks{_why_empty(skipped)}.")
    validation: list[Task] = []
    if validation_split is not None:
        validation, more = _read(validation_split, section, section_key, transcripts)
        skipped += more
        if not validation:
            logger.warning("{}: no validation tasks{}.", validation_split.source, _why_empty(more))
    return TaskSet(tuple(training), tuple(validation), skipped)


def _env_tasks(config: EnvServiceConfig, key: str, transcripts: bool, env_service: EnvServiceAddress | None) -> TaskSet:
    if transcripts:
        raise _no_transcripts("an environment", key)
    training, validation = through_door("tasks", "env_service")(config, f"{key}.env_service", env_service)
    if not training:
        raise TaskDataError(f"split {config.training_split!r} of {config.env_type} has no training tasks.")
    return TaskSet(tuple(training), tuple(validation))


def _no_transcripts(source: str, key: str) -> ConfigError:
    return ConfigError(
        f"algorithm sft trains on transcripts, and {source} has none; set {key}.type to dataset_file or "
        "huggingface_dat_repo"
    )


def _read(
    split: DatasetSplit, section: DatasetFileConfig | HuggingFaceConfig, key: str, transcripts: bool
) -> tuple[list[Task], int]:
    """Return a split's tasks and the number of skipped rows."""
    tasks, problems = make_tasks(split, section.fields, transcripts=transcripts)
    if not problems:
        return tasks, 0
    skipped = sum(map(len, problems.values()))
    summary = f"{split.source}: {skipped} of {len(tasks) + skipped} rows cannot be read:{describe_problems(problems)}"
    if not section.skip_bad_rows:
        raise TaskDataError(f"{summary}\nFix them, or set {key}.skip_bad_rows: true to skip them.")
    logger.warning("{}\nThey are skipped.", summary)
    return tasks, skipped


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Return how many tasks were left out, and why."""
    causes = ", ".join(f"{count} {shorten(cause)}" for cause, count in left_out.items())
    return f"{sum(left_out.values())} tasks ({causes})"


def describe_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """Return one line per reason with the first places, each after a line break."""
    lines = []
    for reason, places in islice(problems.items(), _PROBLEMS_SHOWN):
        more = f" and {len(places) - _PLACES_SHOWN} more" if len(places) > _PLACES_SHOWN else ""
        lines.append(f"\n  {', '.join(places[:_PLACES_SHOWN])}{more}: {reason}")
    if other := sum(map(len, islice(problems.values(), _PROBLEMS_SHOWN, None))):
        lines.append(f"\n  and {other} more")
    return "".join(lines)


def _why_empty(skipped: int) -> str:
    return f" (all {skipped} rows were skipped)" if skipped else " (it has no rows)"

"""Reads the configured training and validation tasks; the base class for your own readers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import (
    MAX_SEED_TASKS,
    DatasetFileConfig,
    HuggingFaceConfig,
    MixturePart,
    RandomDummyConfig,
    TaskReaderConfig,
    part_names,
)
from astuner.doors import through_door
from astuner.env_service.addresses import EnvServiceAddress
from astuner.errors import AstunerError, ConfigError, PluginError, TaskDataError, describe_error, short_repr, shorten
from astuner.plugin import load_class, raised_at
from astuner.schema import Split, Task, TaskSet
from astuner.task_reader.dataset_file import file_splits
from astuner.task_reader.tasks import DatasetSplit, checked_tasks, make_tasks


class BaseTaskReader(ABC):
    """Base class of task readers. `task_reader.type` names one as `package.module->Class`.

    astuner creates one object at the start of the run, with the keyword arguments `task_reader.options`. The tasks
    must be the same, in the same order, whenever a run resumes.
    """

    @abstractmethod
    def training_tasks(self) -> Iterable[Task]:
        """Return the training tasks, with unique ids."""

    def validation_tasks(self) -> Iterable[Task]:
        """Return the validation tasks, with unique ids; none by default."""
        return ()


class RandomDummyReader(BaseTaskReader):
    """`task_reader.type: random_dummy`: tasks with random text. The answer is the first word of the question."""

    def __init__(self, config: RandomDummyConfig, *, transcripts: bool) -> None:
        self._config = config
        self._transcripts = transcripts

    def training_tasks(self) -> Iterator[Task]:
        """Return the training tasks."""
        return (self._task("train", index) for index in range(self._config.training_tasks))

    def validation_tasks(self) -> Iterator[Task]:
        """Return the validation tasks."""
        return (self._task("val", index) for index in range(self._config.validation_tasks))

    def _task(self, split: Split, index: int) -> Task:
        config = self._config
        rng = random.Random(f"{config.seed}|{split}|{index}")
        words = [
            "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9)))
            for _ in range(rng.randint(config.min_words, config.max_words))
        ]
        question, answer = " ".join(words), words[0]
        messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        return Task(
            task_id=f"{split}-{index:06d}",
            main_query="" if self._transcripts else question,
            init_messages=messages if self._transcripts else (),
            metadata={"answer": answer},
        )


class SeedReader(BaseTaskReader):
    """`task_reader.type: seeds`: tasks that are seeds, for workflows that make a task from a seed.

    The seed is `task.metadata["seed"]`. The validation seeds begin `MAX_SEED_TASKS` after the first training seed, so
    they are the same for every number of training tasks.

    Args:
        count, validation_count: numbers of tasks, at most `MAX_SEED_TASKS`.
        first_seed: seed of the first training task.
    """

    def __init__(self, count: int, validation_count: int, first_seed: int) -> None:
        self._count = count
        self._validation_count = validation_count
        self._first_seed = first_seed

    def training_tasks(self) -> Iterator[Task]:
        """Return the training tasks."""
        return map(self._task, range(self._first_seed, self._first_seed + self._count))

    def validation_tasks(self) -> Iterator[Task]:
        """Return the validation tasks."""
        first = self._first_seed + MAX_SEED_TASKS
        return map(self._task, range(first, first + self._validation_count))

    def _task(self, seed: int) -> Task:
        return Task(task_id=f"seed-{seed}", main_query=f"seed {seed}", metadata={"seed": seed})


def load_reader(path: str, options: Mapping[str, Any], search: Sequence[Path]) -> BaseTaskReader:
    """Return a reader of class `path`, created with the keyword arguments `options`.

    Raises:
        PluginError: the class cannot be loaded or created.
    """
    reader_class = load_class(path, BaseTaskReader, search=search)  # type: ignore[type-abstract]
    try:
        return reader_class(**options)
    except AstunerError:
        raise
    except (Exception, SystemExit) as error:
        given = f" with the options {short_repr(dict(options))}" if options else ""
        raise PluginError(
            f"task_reader.type `{path}` could not be created{given}: {describe_error(error)} (at {raised_at(error)})"
        ) from error


def tasks_of(reader: BaseTaskReader, name: str, transcripts: bool) -> TaskSet:
    """Return the tasks of a reader, checked.

    Args:
        transcripts: the tasks are conversations for supervised training.

    Raises:
        TaskDataError: a method raised an error, or returned something else than valid tasks with unique ids, or there
            is no training task.
    """
    splits = {}
    for method in ("training_tasks", "validation_tasks"):
        source = f"{name}, {method}()"
        try:
            items = list(getattr(reader, method)())
        except AstunerError:
            raise
        except (Exception, SystemExit) as error:
            raise TaskDataError(f"{source} raised {describe_error(error)} (at {raised_at(error)}).") from error
        splits[method] = tuple(checked_tasks(items, source, transcripts=transcripts))
    if not splits["training_tasks"]:
        raise TaskDataError(f"{name}, training_tasks() returned no tasks.")
    return TaskSet(splits["training_tasks"], splits["validation_tasks"])


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
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->Name`.
        transcripts: the rows are conversations for supervised training. Each must have chat messages, at least one of
            them from the assistant; they become `Task.init_messages`. `main_query` is "", and `tools`, if a row has
            them, are in `metadata`.
        env_service: the environment service that the run has started.
        section: the name of the section, for messages.

    Returns:
        The tasks, in the order of their rows; ids are unique within a split. In a mixture, a reader's tasks are
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
    """Read one reader's tasks; `key` names its section."""
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
        if transcripts:
            raise _no_transcripts("an environment", key)
        env = config.env_service
        env_training, env_validation = through_door("tasks", "env_service")(env, f"{key}.env_service", env_service)
        if not env_training:
            raise TaskDataError(f"split {env.training_split!r} of {env.env_type} has no training tasks.")
        return TaskSet(tuple(env_training), tuple(env_validation))
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

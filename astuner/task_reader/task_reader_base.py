"""The base class for your own task readers, and the readers for tasks with random text and for seeds."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.config.data import MAX_SEED_TASKS, RandomDummyConfig
from astuner.errors import AstunerError, PluginError, TaskDataError, describe_error, short_repr
from astuner.plugin import load_class, raised_at
from astuner.schema import Split, Task, TaskSet
from astuner.task_reader.tasks import checked_tasks


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
    """

    def __init__(self, count: int, validation_count: int, first_seed: int) -> None:
        """Create the reader.

        Args:
            count, validation_count: numbers of tasks, at most `MAX_SEED_TASKS`.
            first_seed: seed of the first training task.
        """
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
        reader: the reader.
        name: its name in messages.
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

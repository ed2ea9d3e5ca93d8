"""The entry point of the package: configuration in, tasks out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from astuner.config.data import DatasetFileConfig, HuggingFaceConfig, TaskReaderConfig
from astuner.errors import ConfigError, TaskDataError
from astuner.schema import Task, TaskSet
from astuner.task_reader.dataset_file import file_splits
from astuner.task_reader.huggingface_dat_repo import repo_splits
from astuner.task_reader.rows import Split
from astuner.task_reader.tasks import tasks_of

_PROBLEMS_SHOWN = 10


def read_tasks(
    config: TaskReaderConfig, *, base_dir: Path, search: Sequence[Path], transcripts: bool = False
) -> TaskSet:
    """Read the training and validation tasks that section `task_reader` names.

    Args:
        config: the section.
        base_dir: the YAML file's folder; a relative path is looked for in the working directory first, then here.
        search: folders in which `package.module->function` is looked for.
        transcripts: the rows are whole conversations for supervised training. Each needs chat messages with at
            least one by the assistant, which become `Task.init_messages`; `main_query` is "", and `tools`, where
            a row has them, are in `metadata`.

    Returns:
        The tasks, in the order of their rows; ids are unique within a split.

    Raises:
        ConfigError: a reader that is not offered, no path, or a subset that is named twice.
        PluginError: `package.module->function` leads nowhere.
        TaskDataError: a source or a row cannot be read, rows that differ carry one id, or no training task is left.
    """
    section: DatasetFileConfig | HuggingFaceConfig
    if config.type == "dataset_file":
        section = config.dataset_file
        training_split, validation_split = file_splits(section, base_dir, search)
    elif config.type == "huggingface_dat_repo":
        section = config.huggingface_dat_repo
        training_split, validation_split = repo_splits(section, base_dir)
    else:
        raise ConfigError(
            f"astuner.task_reader.type {config.type!r} is not offered yet; use dataset_file or huggingface_dat_repo."
        )
    training, skipped = _read(training_split, section, config.type, transcripts)
    if not training:
        raise TaskDataError(f"{training_split.source}: no training tasks{_left_out(skipped)}.")
    validation: list[Task] = []
    if validation_split is not None:
        validation, more = _read(validation_split, section, config.type, transcripts)
        skipped += more
        if not validation:
            logger.warning("{}: no validation tasks{}.", validation_split.source, _left_out(more))
    _warn_of_overlap(training, validation)
    return TaskSet(tuple(training), tuple(validation), skipped)


def _read(
    split: Split, section: DatasetFileConfig | HuggingFaceConfig, reader: str, transcripts: bool
) -> tuple[list[Task], int]:
    """Tasks of a split and the number of rows left out."""
    tasks, problems = tasks_of(split, section.fields, transcripts=transcripts)
    if not problems:
        return tasks, 0
    shown = "".join(f"\n  {problem}" for problem in problems[:_PROBLEMS_SHOWN])
    if len(problems) > _PROBLEMS_SHOWN:
        shown += f"\n  and {len(problems) - _PROBLEMS_SHOWN} more"
    summary = f"{split.source}: {len(problems)} of {len(tasks) + len(problems)} rows cannot be read:{shown}"
    if not section.skip_bad_rows:
        raise TaskDataError(
            f"{summary}\nMend them, or set astuner.task_reader.{reader}.skip_bad_rows: true to leave them out."
        )
    logger.warning("{}\nThey are left out.", summary)
    return tasks, len(problems)


def _left_out(skipped: int) -> str:
    return f" (all of its {skipped} rows were left out)" if skipped else " (it has no rows)"


def _warn_of_overlap(training: Sequence[Task], validation: Sequence[Task]) -> None:
    questions = {task.main_query for task in training if task.main_query}
    shared = sum(task.main_query in questions for task in validation)
    if shared:
        logger.warning(
            "{} of {} validation tasks ask a question that a training task asks too; validation will look better"
            " than the model is.",
            shared,
            len(validation),
        )

"""The check that tasks are named, and task readers whose tasks are first written to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from astuner.config.data import MixturePart, TaskReaderConfig, part_names
from astuner.config.keys import KeyPath
from astuner.doors import through_door
from astuner.errors import ConfigError


def check_tasks_named(reader: TaskReaderConfig, origins: Mapping[KeyPath, str]) -> None:
    """Check that the user has configured tasks. The default, a dataset of the Hugging Face hub, fits few workflows.

    Args:
        reader: section `task_reader`.
        origins: where the user set each key.

    Raises:
        ConfigError: the section has only defaults.
    """
    if reader == TaskReaderConfig() and not any(path[:2] == ("astuner", "task_reader") for path in origins):
        raise ConfigError(
            "the configuration names no tasks; add the section task_reader under `astuner:`, for example\n"
            "  task_reader: {type: dataset_file, dataset_file: {training: {file_path: tasks.jsonl}}}\n"
            "or, for a workflow that makes a task from a seed,\n"
            "  task_reader: {type: seeds, count: 64}"
        )


def with_task_files(
    reader: TaskReaderConfig, *, transcripts: bool, base_dir: Path, search: Sequence[Path]
) -> TaskReaderConfig:
    """Write the files for readers that make their own tasks, and return the section with readers for these files.

    Args:
        reader: section `task_reader`.
        transcripts: write transcripts for supervised training instead of tasks.
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->function`.

    Raises:
        AstunerError: the tasks cannot be made.
    """

    def written(part: TaskReaderConfig | MixturePart) -> dict[str, object]:
        if part.type == "feedback_tracing":
            write = through_door("tasks", "feedback_tracing")
            files = write(part.feedback_tracing, transcripts=transcripts, base_dir=base_dir, search=search)
        elif part.type == "data_generation":
            if transcripts:
                raise ConfigError(
                    "algorithm sft trains on transcripts, and task_reader.type data_generation generates tasks; set "
                    "task_reader.type to dataset_file or feedback_tracing"
                )
            files = through_door("tasks", "data_generation")(part.data_generation, base_dir=base_dir, search=search)
        else:
            return {}
        return {"type": "dataset_file", "dataset_file": files}

    if reader.type != "mixture":
        return reader.model_copy(update=written(reader))
    named = zip(part_names(reader.mixture), reader.mixture, strict=True)
    parts = [part.model_copy(update={"name": name, **written(part)}) for name, part in named]
    return reader.model_copy(update={"mixture": parts})

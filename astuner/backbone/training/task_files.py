"""Task readers whose tasks are first written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from astuner.config.data import MixturePart, TaskReaderConfig, part_names
from astuner.data_generation import generation_files
from astuner.errors import ConfigError
from astuner.tracing import tracing_files


def with_task_files(
    reader: TaskReaderConfig, *, transcripts: bool, base_dir: Path, search: Sequence[Path]
) -> TaskReaderConfig:
    """Write the files of the readers that make their tasks, and return the section with readers of these files.

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
            files = tracing_files(part.feedback_tracing, transcripts=transcripts, base_dir=base_dir, search=search)
        elif part.type == "data_generation":
            if transcripts:
                raise ConfigError(
                    "algorithm sft trains on transcripts, and task_reader.type data_generation generates tasks; set "
                    "task_reader.type to dataset_file or feedback_tracing"
                )
            files = generation_files(part.data_generation, base_dir=base_dir, search=search)
        else:
            return {}
        return {"type": "dataset_file", "dataset_file": files}

    if reader.type != "mixture":
        return reader.model_copy(update=written(reader))
    named = zip(part_names(reader.mixture), reader.mixture, strict=True)
    parts = [part.model_copy(update={"name": name, **written(part)}) for name, part in named]
    return reader.model_copy(update={"mixture": parts})

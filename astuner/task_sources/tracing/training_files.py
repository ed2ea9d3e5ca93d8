"""Writes the training data of traces to files."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.config.data import DatasetFileConfig, DatasetFileSplit
from astuner.config.task_sources import FeedbackTracingConfig
from astuner.errors import TaskDataError
from astuner.helper_llm.client import LlmClient
from astuner.plugin import load_function
from astuner.run_record.files import dump_json, write_atomically
from astuner.task_reader.dataset_file import find_path, path_from_function
from astuner.task_reader.reader import describe_left_out
from astuner.task_sources.data_generation import evaluate_rows
from astuner.task_sources.tracing.convert import Conversion, Target, convert, redacted
from astuner.task_sources.tracing.reader import read_traces


@dataclass(frozen=True, slots=True)
class ImportedTraces:
    """The result of an import.

    Attributes:
        conversion: the rows and the causes why traces are not in them.
        training, validation: the number of rows of each file.
    """

    conversion: Conversion
    training: int
    validation: int


def import_traces(
    config: FeedbackTracingConfig, target: Target, *, base_dir: Path, search: Sequence[Path]
) -> ImportedTraces:
    """Read the traces of a source and write their training data as JSON Lines.

    The split is random and depends on the number of rows only.

    Args:
        config: section `task_reader.feedback_tracing`.
        target: the kind of rows to convert the traces to.
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->function`.

    Raises:
        PluginError: the function `redact` cannot be loaded.
        TaskDataError: the source cannot be read, or no trace is left.
        RecordError: a file cannot be written.
    """
    clean = load_function(config.redact, search=search) if config.redact else None
    feedback = find_path(config.feedback_path, base_dir) if config.feedback_path else None
    source_path = path_from_function(config.base_url, search) if "->" in config.base_url else config.base_url
    source = find_path(source_path, base_dir)
    read = read_traces(source, feedback, skip_bad_rows=config.skip_bad_rows)
    traces = [redacted(trace, clean, config.redact or "") for trace in read.traces]
    conversion = convert(traces, target, min_rating=config.min_rating)
    if config.filters:
        conversion = _filtered(conversion, config)
    if not conversion.rows:
        raise TaskDataError(
            f"{source}: none of its {len(traces)} traces can be used"
            + (f": left out {describe_left_out(conversion.left_out)}." if conversion.left_out else ".")
        )
    if conversion.left_out:
        logger.info("{}: left out {}", source, describe_left_out(conversion.left_out))
    training, validation = _split(conversion.rows, config.validation_share)
    paths = [(config.train_output_path, training)]
    # An empty file takes the place of the one of an earlier import.
    paths += [(config.validation_output_path, validation)] if config.validation_share else []
    for path, rows in paths:
        write_atomically(Path(path).expanduser(), b"".join(dump_json(row) + b"\n" for row in rows))
    return ImportedTraces(conversion, len(training), len(validation))


def _filtered(conversion: Conversion, config: FeedbackTracingConfig) -> Conversion:
    client = LlmClient(config.llm, config.alien_llm_model, config.alien_llm_response_length)
    left_out = Counter(conversion.left_out)
    try:
        rows = client.run(evaluate_rows(client, conversion.rows, config.filters, left_out))
    finally:
        client.close()
    return Conversion(tuple(rows), dict(left_out))


def _split(rows: Sequence[Any], share: float) -> tuple[list[Any], list[Any]]:
    count = min(round(len(rows) * share), len(rows) - 1)
    chosen = set(random.Random(0).sample(range(len(rows)), count))
    return (
        [row for index, row in enumerate(rows) if index not in chosen],
        [row for index, row in enumerate(rows) if index in chosen],
    )


def tracing_files(
    config: FeedbackTracingConfig, *, transcripts: bool, base_dir: Path, search: Sequence[Path]
) -> DatasetFileConfig:
    """Import traces for a run, and return the section that reads the files.

    Args:
        config: section `task_reader.feedback_tracing`.
        transcripts: import transcripts for supervised training instead of tasks.
        base_dir, search: as for `import_traces`.

    Raises:
        AstunerError: as for `import_traces`.
    """
    imported = import_traces(config, "sft" if transcripts else "tasks", base_dir=base_dir, search=search)
    validation = str(Path(config.validation_output_path).expanduser().absolute()) if imported.validation else ""
    return DatasetFileConfig(
        training=DatasetFileSplit(file_path=str(Path(config.train_output_path).expanduser().absolute())),
        validation=DatasetFileSplit(file_path=validation),
    )

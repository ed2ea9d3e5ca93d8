"""Reads rows from local files: JSON Lines, JSON, CSV and Parquet.

Text formats are parsed row by row with Python's standard library. So errors have a line number, and values keep their
types; a reader that infers one type per column would convert the answer 5 to 5.0, or a tool call's arguments to a
string.
"""

from __future__ import annotations

import codecs
import csv
import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from astuner.config.data import DatasetFileConfig
from astuner.errors import ConfigError, TaskDataError, describe_error, did_you_mean, message_of, short_repr, shorten
from astuner.plugin import load_function, raised_at
from astuner.task_reader.tasks import DatasetRow, DatasetSplit

LOAD_ERRORS = (OSError, ValueError, RuntimeError)
"""The errors that `datasets` raises, in addition to `DatasetsError`, for missing, unreachable or malformed data."""


def file_splits(
    config: DatasetFileConfig, base_dir: Path, search: Sequence[Path]
) -> tuple[DatasetSplit, DatasetSplit | None]:
    """Open the training and the validation file; no rows are read yet.

    Args:
        config: section `task_reader.dataset_file`.
        base_dir: the folder for relative paths that do not exist in the working directory.
        search: the folders in which to search for `package.module->function`.

    Raises:
        ConfigError: there is no path for the training tasks.
        PluginError: `package.module->function` cannot be loaded.
        TaskDataError: a file is missing or has an unknown format, or the function that returns its path failed.
    """
    if not config.training.file_path:
        raise ConfigError(
            "astuner.task_reader.dataset_file.training.file_path is empty; set it to the path of a"
            f" {', '.join(_READERS)} file, or to `package.module->function` that returns one."
        )
    training = _split(config.training.file_path, base_dir, search)
    validation = config.validation.file_path
    return training, _split(validation, base_dir, search) if validation else None


def check_files(config: DatasetFileConfig, base_dir: Path) -> None:
    """Check that the files exist and have a known format, except those that a function names.

    Raises:
        TaskDataError: a file is missing or has an unknown format.
    """
    for path in (config.training.file_path, config.validation.file_path):
        if path and "->" not in path:
            _split(path, base_dir, ())


def _split(file_path: str, base_dir: Path, search: Sequence[Path]) -> DatasetSplit:
    path = path_from_function(file_path, search) if "->" in file_path else file_path
    file = find_path(path, base_dir)
    if not file.is_file():
        raise TaskDataError(f"{short_repr(file_path)}: {_missing_file_message(Path(path).expanduser(), base_dir)}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise TaskDataError(
            f"{file}: cannot read a {file.suffix or 'nameless'} file; supported are {', '.join(_READERS)}."
        )
    return DatasetSplit(str(file), reader(file))


def find_path(path: str, base_dir: Path) -> Path:
    """Return the absolute path in the working directory, or in `base_dir` if it exists only there."""
    relative = Path(path).expanduser()
    in_cwd = Path.cwd() / relative
    return in_cwd if in_cwd.exists() or not (base_dir / relative).exists() else (base_dir / relative).resolve()


def path_from_function(spec: str, search: Sequence[Path]) -> str:
    """Return the path that the function `spec` (`package.module->function`) returns.

    Raises:
        PluginError: the function cannot be loaded.
        TaskDataError: the function failed, or did not return a path.
    """
    make_file = load_function(spec, search=search)
    try:
        path = make_file()
    except (Exception, SystemExit) as error:
        location = raised_at(error, Path.cwd())
        raise TaskDataError(f"{short_repr(spec)} raised {describe_error(error)} (at {location}).") from error
    if not isinstance(path, str | os.PathLike):
        raise TaskDataError(
            f"{short_repr(spec)} returned {short_repr(path)}; expected the path of the file that it wrote."
        )
    return os.fspath(path)


def _missing_file_message(path: Path, base_dir: Path) -> str:
    candidates = list(dict.fromkeys((Path.cwd() / path, (base_dir / path).resolve())))
    if any(candidate.is_dir() for candidate in candidates):
        return f"{path} is a folder; use task_reader.type huggingface_dat_repo for a folder in hub layout."
    folders = [candidate.parent for candidate in candidates if candidate.parent.is_dir()]
    names = [entry.name for folder in folders for entry in folder.iterdir()]
    hint = did_you_mean(path.name, names, " Did you mean {}?", show=str, most=3)
    return f"no file {' or '.join(map(str, candidates))}.{hint}"


def _json_lines(file: Path) -> Iterator[DatasetRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            content, problem = None, ""
            try:
                content = json.loads(text.rstrip().decode())
            except UnicodeDecodeError as error:
                problem = f"not UTF-8: {error.reason} at byte {error.start + 1}"
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg} at column {error.colno}"
            except (ValueError, RecursionError) as error:  # a number with thousands of digits, or too deep nesting
                problem = f"not JSON: {error}"
            yield DatasetRow(f"line {number}", content, problem)


def json_rows(file: Path) -> Iterator[DatasetRow]:
    """Yield the rows of a JSON array; a file without an array is read as JSON Lines.

    Raises:
        TaskDataError: the file is not valid JSON, or cannot be read.
    """
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _json_lines(file)
        return
    try:
        items = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise TaskDataError(f"{file}: not JSON: {error}.") from error
    for number, item in enumerate(items, 1):
        yield DatasetRow(f"item {number}", item)


def _csv(file: Path) -> Iterator[DatasetRow]:
    """Yield the rows of a CSV file with a header; all values are strings."""
    csv.field_size_limit(2**31 - 1)  # a cell may have a whole conversation; the default is 131,072 characters
    with file.open(newline="", encoding="utf-8-sig") as lines:
        table = csv.reader(lines, strict=True)
        try:
            header = next(table, [])
            if len(set(header)) < len(header):
                raise TaskDataError(f"{file}: two columns have the same name: {shorten(', '.join(header), 1000)}.")
            for cells in table:
                where = f"line {table.line_num}"
                if len(cells) == len(header):
                    yield DatasetRow(where, dict(zip(header, cells, strict=True)))
                elif cells:
                    yield DatasetRow(where, problem=f"{len(cells)} cells, but the header has {len(header)}")
        except UnicodeDecodeError as error:
            raise TaskDataError(f"{file}: not UTF-8 after line {table.line_num}: {error.reason}.") from error
        except csv.Error as error:
            raise TaskDataError(f"{file}: not CSV at line {table.line_num}: {error}.") from error


@contextmanager
def quiet_datasets() -> Iterator[ModuleType]:
    """Import `datasets`, which takes seconds, and disable its and the hub client's progress bars during the block."""
    import datasets
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    had_bars, hub_had_bars = not datasets.are_progress_bars_disabled(), not are_progress_bars_disabled()
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        yield datasets
    finally:
        if had_bars:
            datasets.enable_progress_bars()
        if hub_had_bars:
            enable_progress_bars()


def _parquet(file: Path) -> Iterator[DatasetRow]:
    with quiet_datasets() as datasets:
        try:
            # Streaming reads the file in place; without it, `datasets` first copies the file to a cache.
            rows = datasets.load_dataset("parquet", data_files=glob.escape(str(file)), split="train", streaming=True)
            for number, content in enumerate(rows, 1):
                yield DatasetRow(f"row {number}", content)
        except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise TaskDataError(f"{file}: not Parquet: {message_of(error)}") from error


_READERS: dict[str, Callable[[Path], Iterator[DatasetRow]]] = {
    ".jsonl": _json_lines,
    ".json": json_rows,
    ".csv": _csv,
    ".parquet": _parquet,
}

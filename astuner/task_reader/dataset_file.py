"""Rows from local files: JSON Lines, JSON, CSV and Parquet.

Text formats are read with Python's own parsers, row by row, so that a bad row has a line number and a value
arrives as it was written; a reader that infers one type for a column would turn the answer 5 into 5.0, or a
tool call's arguments into a string.
"""

from __future__ import annotations

import codecs
import csv
import glob
import json
import os
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from astuner.config.data import DatasetFileConfig
from astuner.errors import ConfigError, TaskDataError
from astuner.plugin import load_function, raised_at
from astuner.task_reader.quiet_datasets import LOAD_ERRORS, quiet_datasets
from astuner.task_reader.rows import Row, Split


def file_splits(config: DatasetFileConfig, base_dir: Path, search: Sequence[Path]) -> tuple[Split, Split | None]:
    """Open the training and the validation file; no rows are read yet.

    Args:
        config: section `task_reader.dataset_file`.
        base_dir: where relative paths are looked for after the working directory.
        search: folders to look for `package.module->function` in.

    Raises:
        ConfigError: there is no path for the training tasks.
        PluginError: `package.module->function` leads nowhere.
        TaskDataError: a file is missing or of an unknown kind, or the function that makes it failed.
    """
    if not config.training.file_path:
        raise ConfigError(
            "astuner.task_reader.dataset_file.training.file_path is empty; give the path of a"
            f" {', '.join(_READERS)} file, or `package.module->function` that returns one."
        )
    training = _split(config.training.file_path, base_dir, search)
    validation = config.validation.file_path
    return training, _split(validation, base_dir, search) if validation else None


def _split(given: str, base_dir: Path, search: Sequence[Path]) -> Split:
    path = _path_from_function(given, search) if "->" in given else given
    file = find_path(path, base_dir)
    if not file.is_file():
        raise TaskDataError(f"{given!r}: {_not_a_file(Path(path).expanduser(), base_dir)}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise TaskDataError(
            f"{file}: cannot read a {file.suffix or 'nameless'} file; supported are {', '.join(_READERS)}."
        )
    return Split(str(file), reader(file))


def find_path(given: str, base_dir: Path) -> Path:
    """Where `given` exists, in the working directory first, then in `base_dir`; else its place in the former."""
    path = Path(given).expanduser()
    here = Path.cwd() / path
    return here if here.exists() or not (base_dir / path).exists() else (base_dir / path).resolve()


def _path_from_function(given: str, search: Sequence[Path]) -> str:
    make_file = load_function(given, search=search)
    try:
        path = make_file()
    except (Exception, SystemExit) as error:
        place = raised_at(error, Path.cwd())
        raise TaskDataError(f"{given!r} raised {type(error).__name__}: {error} (at {place}).") from error
    if not isinstance(path, str | os.PathLike):
        raise TaskDataError(f"{given!r} returned {path!r}; expected the path of the file that it made.")
    return os.fspath(path)


def _not_a_file(path: Path, base_dir: Path) -> str:
    places = list(dict.fromkeys((Path.cwd() / path, (base_dir / path).resolve())))
    if any(place.is_dir() for place in places):
        return f"{path} is a folder; use task_reader.type huggingface_dat_repo for a folder in hub layout."
    folders = [place.parent for place in places if place.parent.is_dir()]
    near = get_close_matches(path.name, [entry.name for folder in folders for entry in folder.iterdir()], 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"no file {' or '.join(map(str, places))}.{hint}"


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield _decoded(f"line {number}", text.rstrip())


def _decoded(where: str, line: bytes) -> Row:
    try:
        return Row(where, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Row(where, problem=f"not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return Row(where, problem=f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        return Row(where, problem=f"not JSON: {error}")


def _json_array(file: Path) -> Iterator[Row]:
    """Rows of a JSON array; a .json file that holds one object a line is read as JSON Lines."""
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _json_lines(file)
        return
    try:
        items = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise TaskDataError(f"{file}: not JSON: {error}.") from error
    for number, item in enumerate(items, 1):
        yield Row(f"item {number}", item)


def _csv(file: Path) -> Iterator[Row]:
    """Rows of a CSV file with a header; every cell is text."""
    with file.open(newline="", encoding="utf-8-sig") as lines:
        table = csv.reader(lines, strict=True)
        try:
            header = next(table, [])
            if len(set(header)) < len(header):
                raise TaskDataError(f"{file}: two columns have one name: {', '.join(header)}.")
            for cells in table:
                where = f"line {table.line_num}"
                if len(cells) == len(header):
                    yield Row(where, dict(zip(header, cells, strict=True)))
                elif cells:
                    yield Row(where, problem=f"{len(cells)} cells, but the header has {len(header)}")
        except UnicodeDecodeError as error:
            raise TaskDataError(f"{file}: not UTF-8 after line {table.line_num}: {error.reason}.") from error
        except csv.Error as error:
            raise TaskDataError(f"{file}: not CSV at line {table.line_num}: {error}.") from error


def _parquet(file: Path) -> Iterator[Row]:
    with quiet_datasets() as datasets:
        try:
            # Streaming reads the file where it lies; the other way copies it into a cache first.
            rows = datasets.load_dataset("parquet", data_files=glob.escape(str(file)), split="train", streaming=True)
            for number, content in enumerate(rows, 1):
                yield Row(f"row {number}", content)
        except (*LOAD_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise TaskDataError(f"{file}: not Parquet: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
    ".parquet": _parquet,
}

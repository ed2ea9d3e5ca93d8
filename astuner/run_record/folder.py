"""Makes the folder of a run ready, without touching what others left there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from loguru import logger

from astuner.errors import RecordError
from astuner.run_record.files import storing, write_atomically
from astuner.run_record.plain import to_plain
from astuner.run_record.secrets import current_redactor, redact

_ENVIRONMENT = "environment.json"
_CONFIG = "config.yaml"
_FORMAT = 1


def prepare_folder(folder: Path, *, resume: bool) -> Path | None:
    """Make `folder` ready for a run: a resumed one goes on in it, a fresh one gets an empty folder.

    An older run is moved aside to `{folder}.1`, `.2`, …, never changed.

    Returns:
        Where the older run lies now, None where there was none or it is resumed.

    Raises:
        RecordError: the folder holds something that is no run record, or cannot be made.
    """
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # A kill may have left our first file half-written; under the lock nobody is writing it.
        for partial in folder.glob(f".{_ENVIRONMENT}.*.tmp"):
            partial.unlink()
        if not any(folder.iterdir()):
            return None
        if not is_record(folder):
            raise RecordError(
                f"{folder} holds files, but no run record (no {_ENVIRONMENT} of astuner); "
                "empty it, or choose another experiment_name or --exp-dir"
            )
        if resume:
            return None
        # The folder may be given by a link, which stays what it is.
        real = folder.resolve()
        aside = _free_name(real, "")
        os.rename(real, aside)
        real.mkdir()
        return aside


def write_environment(folder: Path, environment: Mapping[str, object]) -> None:
    """Write `environment.json`, without secrets; it is also the mark by which a folder is known to hold a run.

    Where a resumed run has another one than before, the earlier one stays as `environment.1.json`, ….

    Raises:
        RecordError: it cannot be written.
    """
    plain = to_plain({"record_format": _FORMAT, **environment}, current_redactor())
    _write_keeping_older(folder / _ENVIRONMENT, json.dumps(plain, indent=2).encode() + b"\n")


def write_config(folder: Path, config_yaml: str) -> None:
    """Write `config.yaml`, without secrets; an earlier, other one stays as `config.1.yaml`, ….

    Raises:
        RecordError: it cannot be written.
    """
    _write_keeping_older(folder / _CONFIG, redact(config_yaml).encode("utf-8", "backslashreplace"))


def is_record(folder: Path) -> bool:
    """Return whether `folder` holds a run record."""
    try:
        content = json.loads((folder / _ENVIRONMENT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "record_format" in content


def _write_keeping_older(path: Path, data: bytes) -> None:
    with storing(path):
        if path.exists() and path.read_bytes() != data:
            older = _free_name(path.with_suffix(""), path.suffix)
            # A copy, not a rename: a kill must not leave the folder without the file that marks it.
            write_atomically(older, path.read_bytes())
            logger.info("{} differs from the run that is resumed; the earlier one is kept as {}", path, older.name)
    write_atomically(path, data)


def _free_name(stem: Path, suffix: str) -> Path:
    number = 1
    while (candidate := stem.with_name(f"{stem.name}.{number}{suffix}")).exists():
        number += 1
    return candidate

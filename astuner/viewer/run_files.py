"""Files of a run that its record or a request names."""

from __future__ import annotations

from pathlib import Path

from astuner.errors import RecordError


def file_in_run(folder: Path, path: str) -> Path:
    """Return a file of the run in `folder`, with links resolved.

    Args:
        folder: The run's folder.
        path: The file's path relative to it.

    Raises:
        RecordError: If the path is invalid or outside the run's folder.
    """
    try:
        file = (folder / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise RecordError(f"the index names an invalid file: {path[:80]!r} ({error})") from error
    if not file.is_relative_to(folder.resolve()):
        raise RecordError("the index names a file outside the run's folder, which is not opened")
    return file

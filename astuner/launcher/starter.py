"""`astuner init`: a starter project that runs without changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from astuner.errors import ConfigError

_TEMPLATES = Path(__file__).parent / "starter_project"
# Packaging tools leave out names that start with a dot.
_FOLDERS = {"vscode": ".vscode"}


@dataclass(frozen=True)
class StarterFiles:
    """Files of a starter project, relative to its folder.

    Attributes:
        written: new files.
        existing: files that existed before, and are unchanged.
    """

    written: tuple[str, ...]
    existing: tuple[str, ...]


def start_project(folder: Path) -> StarterFiles:
    """Write the starter project into `folder`. Existing files are not overwritten.

    Raises:
        ConfigError: a file cannot be written.
    """
    written, existing = [], []
    for source in sorted(path for path in _TEMPLATES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        first, *rest = source.relative_to(_TEMPLATES).parts
        path = Path(_FOLDERS.get(first, first), *rest)
        target = folder / path
        if target.exists():
            existing.append(str(path))
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"cannot write {target}: {error.strerror or error}; give `astuner init` a writable folder"
            ) from error
        written.append(str(path))
    return StarterFiles(tuple(written), tuple(existing))

"""`astuner init`: a project that runs as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from astuner.errors import ConfigError

_FILES = Path(__file__).parent / "starter_project"
# Tools that pack files leave out names with a dot.
_PLACES = {"vscode": ".vscode"}


@dataclass(frozen=True)
class Started:
    """What became of a project's files.

    Attributes:
        written: new ones, relative to the project.
        kept: those that were there before, left as they are.
    """

    written: tuple[str, ...]
    kept: tuple[str, ...]


def start_project(folder: Path) -> Started:
    """Write the starter project into `folder`; a file that is there is kept.

    Raises:
        ConfigError: a file cannot be written.
    """
    written, kept = [], []
    for source in sorted(path for path in _FILES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        first, *rest = source.relative_to(_FILES).parts
        place = Path(_PLACES.get(first, first), *rest)
        target = folder / place
        if target.exists():
            kept.append(str(place))
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"cannot write {target}: {error.strerror or error}; give `astuner init` a folder that can be written to"
            ) from error
        written.append(str(place))
    return Started(tuple(written), tuple(kept))

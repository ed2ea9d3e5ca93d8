"""The folder of the environments that `astuner install` makes."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_VARIABLE = "ASTUNER_ENVIRONMENTS"


def environments_folder() -> Path:
    """Return the parent folder of all environments: $ASTUNER_ENVIRONMENTS, or a folder in the user's data folder."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "astuner" / "environments"


def installed_program(name: str, program: str) -> str | None:
    """Return the path of a program in the named environment; None if the program is not installed."""
    path = environments_folder() / name / "bin" / program
    return str(path) if path.is_file() and os.access(path, os.X_OK) else None

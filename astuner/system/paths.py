"""Where the environments of `astuner install` are, and where processes find astuner; removal of folders; packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
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


def remove_folder(folder: Path) -> None:
    """Remove a folder with its contents, including read-only folders. Files that cannot be removed are left."""

    def make_writable(_function: object, path: str, _error: object) -> None:
        for entry in (Path(path).parent, Path(path)):
            with contextlib.suppress(OSError):
                if not entry.is_symlink():
                    entry.chmod(0o700)
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if Path(path).is_dir() and not Path(path).is_symlink() else Path(path).unlink()

    shutil.rmtree(folder, onerror=make_writable)
    shutil.rmtree(folder, ignore_errors=True)


def python_path(*first: str | None) -> str:
    """Return a PYTHONPATH for this process's astuner, even if not installed, after the non-empty parts of `first`."""
    package = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, (*first, package, os.environ.get("PYTHONPATH"))))


def installed_version(package: str) -> str | None:
    """Return the version of a package in this interpreter, None if it is not installed; does not import it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(package: str) -> bool:
    """Return whether Python finds a package, without importing it."""
    spec = importlib.util.find_spec(package)
    # A folder of that name in the working directory is a namespace package, which has no origin.
    return spec is not None and spec.origin is not None

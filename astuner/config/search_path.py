"""Where the files named in `defaults` lists are looked up: the `hydra:` section of a user's YAML."""

from __future__ import annotations

import os
import re
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.aliases import Canonical
from astuner.config.keys import dotted
from astuner.config.problems import Problem
from astuner.config.yaml_file import first_line
from astuner.errors import ConfigError

SHIPPED_FOLDER = Path(__file__).resolve().parent.parent / "default_config"
_SHIPPED_ENTRY = re.compile(r"^(?:file://)?(?:\./)?(?:astuner|astune|ajet)/default_config(?:/|$)")


def search_folders(main: Canonical, given: list[str] | None) -> tuple[Path, ...]:
    """The folder of the main file, then those of its `hydra.searchpath` (or of `given`, from the command line).

    The package's own `astuner/default_config` is always searched, so entries that name it are passed over.

    Raises:
        ConfigError: an entry leads to no folder.
    """
    here = main.file.path.absolute().parent
    folders = [here]
    for index, entry in enumerate(_entries(main) if given is None else given):
        where = "command line" if given is not None else main.file.where(("hydra", "searchpath", str(index)))
        folder = None if _SHIPPED_ENTRY.match(entry) else _folder(entry, here, where)
        if folder is not None and not folder.is_relative_to(SHIPPED_FOLDER) and folder not in folders:
            folders.append(folder)
    return tuple(folders)


def hydra_problems(file: Canonical, main: Canonical) -> list[Problem]:
    """What is wrong with a file's `hydra:` section: only `searchpath` means something, and only in the main file."""
    section = file.tree.get("hydra")
    problems = []
    for name in section if isinstance(section, dict) else ():
        key = ("hydra", str(name))
        if name != "searchpath":
            problems.append(Problem(f"{dotted(key)} has no effect here; remove it", file.file.where(key)))
        elif file is not main and not all(_SHIPPED_ENTRY.match(entry) for entry in _entries(file)):
            text = f"hydra.searchpath belongs into the file that is run ({main.file.path.name})"
            problems.append(Problem(text, file.file.where(key)))
    return problems


def _entries(file: Canonical) -> list[str]:
    section = file.tree.get("hydra")
    if not isinstance(section, dict) or not section.get("searchpath"):
        return []
    where = file.file.where(("hydra", "searchpath"))
    try:
        entries = OmegaConf.to_container(OmegaConf.create({"entries": section["searchpath"]}), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: hydra.searchpath: {first_line(error)}") from error
    assert isinstance(entries, dict)
    if not isinstance(entries["entries"], list):
        raise ConfigError(f"{where}: hydra.searchpath is {entries['entries']!r}; expected a list of file:// folders")
    return [str(entry) for entry in entries["entries"]]


def _folder(entry: str, here: Path, where: str) -> Path:
    scheme, separator, rest = entry.rpartition("://")
    if separator and scheme != "file":
        raise ConfigError(f"{where}: hydra.searchpath entry {entry!r}: only file:// folders are offered")
    wanted = Path(os.path.expanduser(rest))
    places = (wanted,) if wanted.is_absolute() else (here / wanted, Path.cwd() / wanted)
    for place in places:
        if place.is_dir():
            return place.resolve()
    tried = " nor ".join(str(place) for place in places)
    raise ConfigError(f"{where}: hydra.searchpath entry {entry!r} leads to no folder: not {tried}")

"""The YAML files that Hydra reads: where they are found, and a config source that gives Hydra their canonical keys."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.aliases import CanonicalFile, canonical_default_name, canonical_file
from astuner.config.keys import dotted
from astuner.config.problems import Problem
from astuner.config.yaml_file import SHIPPED_FOLDER, SUFFIXES, read_yaml, reason_of, shown
from astuner.errors import ConfigError

MAIN = "the_user_yaml"
"""The name under which Hydra sees the user's main file, whatever the file's name."""

SHIPPED = ("verl_default", "trinity_default", "astuner_default")
"""The defaults in the package: always loaded, in this order, before the user's files."""

_SHIPPED_GROUP = "astuner_shipped"
_SHIPPED_ENTRY = re.compile(r"^(?:file://)?(?:\./)?(?:astuner|astune|ajet)/default_config(?:/|$)")


@cache
def _shipped() -> dict[str, DictConfig | ListConfig]:
    """Return the package's defaults, by their `defaults` entries.

    They are read once a process, and with libyaml if it is there: parsing them takes most of the time of a composition
    otherwise.
    """
    found = {}
    for name in SHIPPED:
        (path,) = SHIPPED_FOLDER.rglob(f"{name}.yaml")
        tree = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        found[f"{_SHIPPED_GROUP}/{name}"] = OmegaConf.create(tree)
    return found


def shipped_entries() -> tuple[str, ...]:
    """Return the `defaults` entries under which Hydra sees the package's defaults."""
    return tuple(_shipped())


@dataclass(slots=True)
class HydraSession:
    """State of one composition.

    Attributes:
        folders: folders to look up `defaults` entries in; the first match wins.
        files: every file read so far, by path.
    """

    folders: tuple[Path, ...] = ()
    files: dict[Path, CanonicalFile] = field(default_factory=dict)

    def canonical(self, path: Path) -> CanonicalFile:
        """Return a file with canonical keys; it is read once.

        Raises:
            ConfigError: the file cannot be read.
        """
        if path not in self.files:
            self.files[path] = canonical_file(read_yaml(path))
        return self.files[path]

    def find(self, name: str) -> Path | None:
        """Return the file of the `defaults` entry `name`, or None."""
        paths = (find_yaml(folder, name) for folder in self.folders)
        return next((path for path in paths if path is not None), None)

    def has_group(self, name: str) -> bool:
        """Return whether there is a config group (a folder of alternative files) `name`."""
        return any((folder / name).is_dir() for folder in self.folders)

    def is_shipped(self, entry: object) -> bool:
        """Return whether a `defaults` entry is one of the package's defaults, under any accepted name.

        Raises:
            ConfigError: a user's file has the name of a shipped default, which makes the entry ambiguous.
        """
        if not isinstance(entry, str):
            return False
        name = re.sub(r"^(verl|trinity)/", "", entry.strip("/"))
        path = self.find(name)
        if path is None or path.is_relative_to(SHIPPED_FOLDER):
            return canonical_default_name(name) in SHIPPED
        if name in SHIPPED:
            raise ConfigError(f"{shown(path)} has the name of a default that astuner ships and loads; rename the file")
        return False


_session: ContextVar[HydraSession] = ContextVar("_session")


@contextmanager
def hydra_session() -> Iterator[HydraSession]:
    """Create the session that `UserYamlSource` uses in this block."""
    token = _session.set(HydraSession())
    try:
        yield _session.get()
    finally:
        _session.reset(token)


def search_folders(main: CanonicalFile, override: list[str] | None) -> tuple[Path, ...]:
    """Return the main file's folder, followed by the folders in its `hydra.searchpath`.

    Entries that name the package's `astuner/default_config` are skipped: it is always searched.

    Args:
        main: the main file.
        override: `hydra.searchpath` from the command line, which replaces the main file's.

    Raises:
        ConfigError: an entry is not an existing folder.
    """
    base = main.file.path.absolute().parent
    folders = [base]
    for index, entry in enumerate(_search_path(main) if override is None else override):
        where = "command line" if override is not None else main.file.where(("hydra", "searchpath", str(index)))
        folder = None if _SHIPPED_ENTRY.match(entry) else _folder(entry, base, where)
        if folder is not None and not folder.is_relative_to(SHIPPED_FOLDER) and folder not in folders:
            folders.append(folder)
    return tuple(folders)


def hydra_problems(file: CanonicalFile, main: CanonicalFile) -> Iterator[Problem]:
    """Yield the problems of a file's `hydra:` section: only the main file can have it, with only `searchpath`."""
    section = file.tree.get("hydra")
    for name in section if isinstance(section, dict) else ():
        key = ("hydra", str(name))
        if name != "searchpath":
            yield Problem(f"{dotted(key)} has no effect; remove it", file.file.where(key))
        elif file is not main and not all(_SHIPPED_ENTRY.match(entry) for entry in _search_path(file)):
            text = f"hydra.searchpath has an effect only in the main file ({main.file.path.name}); move it there"
            yield Problem(text, file.file.where(key))


def _search_path(file: CanonicalFile) -> list[str]:
    section = file.tree.get("hydra")
    if not isinstance(section, dict) or not section.get("searchpath"):
        return []
    where = file.file.where(("hydra", "searchpath"))
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create({"entries": section["searchpath"]}), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: hydra.searchpath: {reason_of(error)}") from error
    if not isinstance(tree["entries"], list):
        raise ConfigError(f"{where}: hydra.searchpath is {tree['entries']!r}; expected a list of file:// folders")
    return [str(entry) for entry in tree["entries"]]


def _folder(entry: str, base: Path, where: str) -> Path:
    scheme, separator, rest = entry.rpartition("://")
    if separator and scheme != "file":
        raise ConfigError(f"{where}: hydra.searchpath entry {entry!r}: only file:// folders are supported")
    path = Path(os.path.expanduser(rest))
    candidates = (path,) if path.is_absolute() else (base / path, Path.cwd() / path)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    tried = " nor ".join(str(candidate) for candidate in candidates)
    raise ConfigError(f"{where}: hydra.searchpath entry {entry!r} is not a folder: there is no {tried}")


def find_yaml(folder: Path, name: str) -> Path | None:
    """Return the file of the `defaults` entry `name` in a folder, or None."""
    names = (name,) if name.endswith(SUFFIXES) else tuple(name + suffix for suffix in SUFFIXES)
    return next((folder / name for name in names if (folder / name).is_file()), None)


class UserYamlSource(ConfigSource):
    """A Hydra source of the YAML files in a folder; or, if its path is a file, of that file under the name `MAIN`.

    The source of a file also has the package's defaults.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the search path entries that this source serves."""
        return "astuner"

    def _find(self, config_path: str) -> Path | None:
        path = Path(self.path)
        if path.is_file():
            return path if config_path == MAIN else None
        return find_yaml(path, config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file with canonical keys, without `hydra:` and without the shipped defaults in its `defaults`."""
        if self._has_shipped(config_path):
            config = copy.deepcopy(_shipped()[config_path])
            return ConfigResult(self.provider, self.full_path(), config, {"package": "_global_"})
        path = self._find(config_path)
        if path is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        file = _session.get().canonical(path)
        tree = {key: value for key, value in file.tree.items() if key != "hydra"}
        if "defaults" in tree:
            tree["defaults"] = _user_defaults(file)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(tree),
            header=self._get_header_dict(file.file.text[:512]),
        )

    def is_config(self, config_path: str) -> bool:
        """Return whether the file `config_path` exists."""
        return self._has_shipped(config_path) or self._find(config_path) is not None

    def _has_shipped(self, config_path: str) -> bool:
        return config_path in _shipped() and Path(self.path).is_file()

    def is_group(self, config_path: str) -> bool:
        """Return whether the folder `config_path` exists."""
        return (Path(self.path) / config_path).is_dir()

    def available(self) -> bool:
        """Return whether the folder or file exists."""
        return Path(self.path).exists()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a folder, for Hydra's messages about a missing entry."""
        folder = Path(self.path) / config_path
        names: list[str] = []
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            self._list_add_result(
                files=names,
                file_path=str(Path(config_path) / entry.name),
                file_name=entry.name,
                results_filter=results_filter,
            )
        return names


def _user_defaults(file: CanonicalFile) -> list[Any]:
    """Return the `defaults` list without the shipped defaults, which are always loaded first."""
    entries = file.tree["defaults"]
    if not isinstance(entries, list):
        raise ConfigError(f"{file.where(('defaults',))}: defaults is {entries!r}; expected a list of YAML file names")
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) and not (isinstance(entry, dict) and len(entry) == 1):
            where = file.where(("defaults", str(index)))
            raise ConfigError(f"{where}: defaults entry {entry!r}; expected a file name or `folder: name`")
    user_entries = [entry for entry in entries if not _session.get().is_shipped(entry)]
    return user_entries if "_self_" in user_entries else [*user_entries, "_self_"]

"""Where Hydra reads user YAML files: through a source of ours, which hands it canonical keys and remembers lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from astuner.config.aliases import Canonical, canonical_default_name, canonical_file
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.yaml_file import SUFFIXES, read_yaml, shown
from astuner.errors import ConfigError

MAIN = "the_user_yaml"
"""The name under which Hydra sees the user's main file, whatever the file is called."""

SHIPPED = ("verl_default", "trinity_default", "astuner_default")
"""The defaults that the package ships: always loaded, in this order, before anything of the user's."""


@dataclass(slots=True)
class Session:
    """One loading of a configuration.

    Attributes:
        folders: where `defaults` entries are looked up, first match wins.
        files: every file read so far, by path.
    """

    folders: tuple[Path, ...] = ()
    files: dict[Path, Canonical] = field(default_factory=dict)

    def canonical(self, path: Path) -> Canonical:
        """The file in today's spelling, read once.

        Raises:
            ConfigError: it cannot be read.
        """
        if path not in self.files:
            self.files[path] = canonical_file(read_yaml(path))
        return self.files[path]

    def find(self, name: str) -> Path | None:
        """The file that the `defaults` entry `name` means, or None."""
        found = (find_yaml(folder, name) for folder in self.folders)
        return next((path for path in found if path is not None), None)

    def has_group(self, name: str) -> bool:
        """Whether there is a folder `name` of interchangeable files."""
        return any((folder / name).is_dir() for folder in self.folders)

    def is_shipped(self, entry: object) -> bool:
        """Whether an entry of a `defaults` list names a shipped default, in any spelling.

        Raises:
            ConfigError: a file of the user's has the name of a shipped default, so that it is unclear which is meant.
        """
        if not isinstance(entry, str):
            return False
        name = re.sub(r"^(verl|trinity)/", "", entry.strip("/"))
        own = self.find(name)
        if own is None or own.is_relative_to(SHIPPED_FOLDER):
            return canonical_default_name(name) in SHIPPED
        if name in SHIPPED:
            raise ConfigError(
                f"{shown(own)} has the name of a default that astuner ships and always loads; rename the file"
            )
        return False


_session: ContextVar[Session] = ContextVar("_session")


@contextmanager
def session() -> Iterator[Session]:
    """The session that the source serves inside this block."""
    token = _session.set(Session())
    try:
        yield _session.get()
    finally:
        _session.reset(token)


def find_yaml(folder: Path, name: str) -> Path | None:
    """The file that a `defaults` entry `name` means in `folder`, or None."""
    names = (name,) if name.endswith(SUFFIXES) else tuple(name + suffix for suffix in SUFFIXES)
    return next((folder / name for name in names if (folder / name).is_file()), None)


class UserYamlSource(ConfigSource):
    """Serves the YAML files of one folder; or, where its path is a file, that file under the name `MAIN`."""

    @staticmethod
    def scheme() -> str:
        """The scheme of search path entries that this source serves."""
        return "astuner"

    def _find(self, config_path: str) -> Path | None:
        here = Path(self.path)
        if here.is_file():
            return here if config_path == MAIN else None
        return find_yaml(here, config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; what Hydra needs not know (`hydra:`, shipped defaults, older spellings) is taken out."""
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
        """Whether there is such a file."""
        return self._find(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        """Whether there is such a folder."""
        return (Path(self.path) / config_path).is_dir()

    def available(self) -> bool:
        """Whether the folder or file is there."""
        return Path(self.path).exists()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names in a folder, for Hydra's messages about an entry that is not there."""
        folder = Path(self.path) / config_path
        found: list[str] = []
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            self._list_add_result(
                files=found,
                file_path=str(Path(config_path) / entry.name),
                file_name=entry.name,
                results_filter=results_filter,
            )
        return found


def _user_defaults(file: Canonical) -> list[Any]:
    """The `defaults` list without the shipped ones: those come first, once, wherever the user's files name them."""
    entries = file.tree["defaults"]
    if not isinstance(entries, list):
        raise ConfigError(f"{file.where(('defaults',))}: defaults is {entries!r}; expected a list of YAML file names")
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) and not (isinstance(entry, dict) and len(entry) == 1):
            where = file.where(("defaults", str(index)))
            raise ConfigError(f"{where}: defaults entry {entry!r}; expected a file's name or `folder: name`")
    kept = [entry for entry in entries if not _session.get().is_shipped(entry)]
    return kept if "_self_" in kept else [*kept, "_self_"]


def register() -> None:
    """Make the source known to Hydra; doing it again changes nothing."""
    Plugins.instance().register(UserYamlSource)

"""Composes a YAML file, its `defaults` and command-line overrides with Hydra, and records where each key was set."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.canonical import (
    COMMAND_LINE,
    CommandLine,
    canonical_default_name,
    canonical_file,
    check_keys,
    parse_overrides,
)
from astuner.config.keys import KeyPath, dotted, parts, schema, with_value, without
from astuner.config.root import RunConfig
from astuner.config.validation import (
    Draft,
    Problem,
    origin_of,
    outermost_unknown,
    raise_problems,
    unknown_key,
    wrong_containers,
)
from astuner.config.yaml_file import (
    SHIPPED_FOLDER,
    SUFFIXES,
    YamlFile,
    find_yaml,
    hydra_errors,
    key_path,
    place,
    read_yaml,
    reason_of,
    search_folders,
    shown,
)
from astuner.errors import ConfigError, did_you_mean

_RUN = "astuner_run"
_MAIN = "the_user_yaml"
"""The name under which Hydra sees the user's main file, whatever the file's name."""
_SHIPPED = ("verl_default", "trinity_default", "astuner_default")
"""Files with the defaults, which are always below the user's files: entries with their names are left out."""
_OWN_KEYS = ("hydra", "defaults")
"""Keys in a file that are about Hydra, and not part of the configuration."""
# The settings of an application, which Hydra would compose, too. It reads the file even if the group is deleted (`~`).
_WITHOUT_APPLICATION = tuple(
    f"hydra/{group}=[]"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
)
_hydra_lock = threading.Lock()


def compose_files(main: Path, overrides: Sequence[str]) -> Draft:
    """Merge the shipped defaults, the files in the `defaults` of `main`, `main` itself and `overrides`.

    Raises:
        ConfigError: a file is missing or not valid YAML, or Hydra cannot compose the files.
    """
    main = Path(os.path.abspath(main))
    command_line = parse_overrides(overrides)
    file = canonical_file(read_yaml(main))
    session = _Session(main, search_folders(file, command_line.search_path), {main: file})
    check_keys(command_line, lambda name: any((folder / name).is_dir() for folder in session.folders))
    config, files = _compose(main, session, command_line)
    origins: dict[KeyPath, str] = {}
    notices: dict[str, str] = {}
    unknown: list[KeyPath] = []
    problems: list[Problem] = []
    for layer in files:
        origins |= {path: place(layer.path, line) for path, line in layer.lines.items()}
        notices |= layer.notices
        outermost = outermost_unknown(layer.lines)
        unknown += outermost
        problems += [unknown_key(path, layer.where(path)) for path in outermost]
    problems += [problem for layer in files for problem in layer.problems]
    # The items of a list that the command line replaces have no place.
    items = {path for path in origins if path[-1].isdigit() and _is_below(path, command_line.keys)}
    origins = {path: where for path, where in origins.items() if path not in items}
    origins |= dict.fromkeys(command_line.keys, COMMAND_LINE)
    origins = {path: where for path, where in origins.items() if not _is_below(path, command_line.deleted)}
    tree = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    tree = without(_merged(RunConfig().model_dump(), without(tree, unknown)), command_line.deleted)
    tree, unresolved = _resolved(tree, origins)
    told = tuple((notices | command_line.notices).values())
    return Draft(tree, origins, told, (*problems, *command_line.problems, *unresolved))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` in it. Hydra would copy `below` five times."""
    merged = dict(below)
    for name, value in above.items():
        base = merged.get(name)
        merged[name] = _merged(base, value) if isinstance(base, dict) and isinstance(value, dict) else value
    return merged


def _is_below(path: KeyPath, keys: list[KeyPath]) -> bool:
    return any(path[: len(key)] == key for key in keys)


def _compose(main: Path, session: _Session, command_line: CommandLine) -> tuple[DictConfig, list[YamlFile]]:
    _register()
    overrides = [*_WITHOUT_APPLICATION, *command_line.lines]
    token = _session.set(session)
    try:
        with isolated_hydra(), initialize(config_path=None, version_base="1.3"):
            try:
                config, failed = compose(_RUN, overrides=overrides), None
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                failed = error
            layers = _layers(main, session, overrides)
            wrong = ((layer.where(path), text) for layer in layers for path, text in wrong_containers(layer.tree))
            raise_problems([Problem(text, where) for where, text in wrong])
            if failed is not None:
                raise failed
            return config, layers
    except MissingConfigException as error:
        raise ConfigError(_missing_default(error, session)) from error
    except RecursionError:
        raise ConfigError(f"{shown(main)}: the files of its defaults lists name each other in a circle") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra raises OmegaConf's errors as the cause of an error without text, and names a failed override.
        text = str(error) or str(error.__cause__)
        reason = " ".join(line.strip() for line in text.splitlines() if "object_type" not in line)
        on_command_line = any(dotted(key) in reason for key in (*command_line.keys, *command_line.deleted))
        where = COMMAND_LINE if on_command_line else shown(main)
        raise ConfigError(f"{where}: {reason.replace(_MAIN, main.name)}") from error
    finally:
        _session.reset(token)


def _layers(main: Path, session: _Session, overrides: list[str]) -> list[YamlFile]:
    """Return the user's files, each in its package, in the order in which Hydra merged them."""
    main_file = session.files[main]
    if len(session.files) == 1 and "@package" not in main_file.text:
        return [_in_package(main_file, (), main_file)]  # the common case, without a second pass over all files
    loader = GlobalHydra.instance().config_loader()
    layers = []
    for default in loader.compute_defaults_list(_RUN, overrides, RunMode.RUN).defaults:
        path = main if default.config_path == _MAIN else session.find(default.config_path or "")
        if path in session.files:
            package = parts(default.package) if default.package else ()
            layers.append(_in_package(session.files[path], package, main_file))
    return layers


def _in_package(file: YamlFile, package: KeyPath, main: YamlFile) -> YamlFile:
    """Return a file with its keys moved below the section `package`."""
    tree: Mapping[str, Any] = {name: value for name, value in file.tree.items() if name not in _OWN_KEYS}
    return replace(
        file,
        tree=with_value({}, package, tree) if package else tree,
        lines={(*package, *path): line for path, line in file.lines.items() if path[0] not in _OWN_KEYS},
        problems=(*file.problems, *hydra_errors(file, main)),
    )


@contextmanager
def isolated_hydra() -> Iterator[None]:
    """Save and restore Hydra's global state, which a caller may use, too."""
    with _hydra_lock:
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            if outer is not None:
                GlobalHydra.instance().initialize(outer)


def _missing_default(error: MissingConfigException, session: _Session) -> str:
    name = error.missing_cfg_file or ""
    names = sorted(path.stem for folder in session.folders for path in folder.iterdir() if path.suffix in SUFFIXES)
    hint = did_you_mean(name, names, "; did you mean {}?", cutoff=0.5)
    folders = ", ".join(shown(folder) for folder in session.folders)
    where = ""
    for file in session.files.values():
        for index, entry in enumerate(file.tree.get("defaults") or ()):
            if _names(entry, name):
                where = f"{file.where(('defaults', str(index)))}: "
    return f"{where}defaults: there is no {name}.yaml in {folders}{hint}"


def _names(entry: object, name: str) -> bool:
    """Return whether an entry of a `defaults` list (`base`, `group: option`, `optional …`) is the config `name`."""
    if isinstance(entry, dict):
        return any(name == f"{str(group).split()[-1].strip('/')}/{option}" for group, option in entry.items())
    return isinstance(entry, str) and entry.split("@")[0].strip("/") == name


def _resolved(tree: dict[str, Any], origins: Mapping[KeyPath, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the tree with `${…}` resolved and without the keys that cannot be, and a problem for each of these."""
    problems: list[Problem] = []
    while _has_references(tree):
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            path = key_path(error.full_key or "")
            key = schema().owner(path) or path
            if not key:
                raise ConfigError(reason_of(error)) from error
            problems.append(Problem(f"{dotted(key)}: {reason_of(error)}", origin_of(origins, key), keys=(key,)))
            tree = without(tree, [key])
        else:
            tree = cast(dict[str, Any], resolved)
            break
    return {str(name): value for name, value in tree.items()}, problems


def _has_references(value: object) -> bool:
    """Return whether OmegaConf has something to resolve in a tree, which it takes long to look for."""
    if isinstance(value, str):
        return "${" in value or value == "???"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_references, items))


@dataclass(frozen=True, slots=True)
class _Session:
    """The user's files in one composition.

    Attributes:
        main: the main file.
        folders: folders to look up `defaults` entries in; the first match wins.
        files: every file read so far, by path.
    """

    main: Path
    folders: tuple[Path, ...]
    files: dict[Path, YamlFile]

    def find(self, name: str) -> Path | None:
        """Return the file of the `defaults` entry `name`, or None."""
        paths = (find_yaml(folder, name) for folder in self.folders)
        return next((path for path in paths if path is not None), None)

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
            return canonical_default_name(name) in _SHIPPED
        if name in _SHIPPED:
            raise ConfigError(f"{shown(path)} has the name of a default that astuner ships and loads; rename the file")
        return False


_session: ContextVar[_Session] = ContextVar("_session")


@cache
def _register() -> None:
    """Tell Hydra the composition's root, which is the user's main file, and the source of files."""
    ConfigStore.instance().store(name=_RUN, node=OmegaConf.create({"defaults": [_MAIN]}))
    Plugins.instance().register(_YamlSource)
    Plugins.instance().register(_YamlFolders)


class _YamlFolders(SearchPathPlugin):
    """Adds the user's files and folders to the search path of a composition."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them, or nothing if the process composes for itself."""
        session = _session.get(None)
        for path in (session.main, *session.folders) if session else ():
            search_path.append("astuner", f"{_YamlSource.scheme()}://{path}")


class _YamlSource(ConfigSource):
    """A Hydra source for the YAML files in a folder or, if its path is a file, for that file under the name `_MAIN`."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the search path entries that this source serves."""
        return "astuner"

    def _find(self, config_path: str) -> Path | None:
        path = Path(self.path)
        if path.is_file():
            return path if config_path == _MAIN else None
        return find_yaml(path, config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file with canonical keys, without `hydra:` and without the shipped defaults in its `defaults`."""
        path = self._find(config_path)
        if path is None:
            raise ConfigLoadError(f"Config not found: {config_path}")
        files = _session.get().files
        if path not in files:
            files[path] = canonical_file(read_yaml(path))
        file = files[path]
        tree = {key: value for key, value in file.tree.items() if key != "hydra"}
        if "defaults" in tree:
            tree["defaults"] = _user_defaults(file)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(tree),
            header=self._get_header_dict(file.text[:512]),
        )

    def is_config(self, config_path: str) -> bool:
        """Return whether the file `config_path` exists."""
        return self._find(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        """Return whether the folder `config_path` exists."""
        return (Path(self.path) / config_path).is_dir()

    def available(self) -> bool:
        """Return whether the folder or file exists."""
        return Path(self.path).exists()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return no names: Hydra lists them only in messages that `_missing_default` replaces."""
        return []


def _user_defaults(file: YamlFile) -> list[Any]:
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

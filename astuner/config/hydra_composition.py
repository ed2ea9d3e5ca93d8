"""Compose a YAML file, its `defaults` and command-line overrides with Hydra, and record where each key was set."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.aliases import CanonicalFile
from astuner.config.hydra_files import (
    MAIN,
    HydraSession,
    UserYamlSource,
    hydra_problems,
    hydra_session,
    search_folders,
    shipped_entries,
)
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.nested_dict import drop_at
from astuner.config.overrides import COMMAND_LINE, CommandLine, check_keys, parse_overrides
from astuner.config.problems import Problem, outermost_unknown, raise_problems, unknown_key, wrong_containers
from astuner.config.yaml_file import SUFFIXES, key_path, place, reason_of, shown
from astuner.errors import ConfigError, did_you_mean

_RUN = "astuner_run"
_hydra_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Composed:
    """All layers merged into one tree.

    Attributes:
        tree: every value, with references resolved and without unknown keys.
        origins: where the user set a key or section (`file:line`, `command line`); the last place wins.
        notices: notices about aliases.
        problems: unknown keys, conflicting aliases, references that cannot be resolved.
    """

    tree: dict[str, Any]
    origins: Mapping[KeyPath, str]
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A user file and the package (section) of its keys."""

    file: CanonicalFile
    package: KeyPath

    def origins(self) -> Iterator[tuple[KeyPath, str]]:
        """Yield every key that the file sets, and its place."""
        for path, line in self.file.lines.items():
            if path[0] not in ("hydra", "defaults"):
                yield (*self.package, *path), place(self.file.file.path, line)

    def wrong_containers(self) -> Iterator[Problem]:
        """Yield the lists and mappings at keys of the other kind, which Hydra cannot merge."""
        tree = {key: value for key, value in self.file.tree.items() if key not in ("hydra", "defaults")}
        for path, text in wrong_containers(tree, self.package):
            yield Problem(text, self.file.file.where(path[len(self.package) :]), keys=(path,))


def compose_files(main: Path, overrides: Sequence[str]) -> Composed:
    """Merge the shipped defaults, the files in the `defaults` of `main`, `main` itself and `overrides`.

    Raises:
        ConfigError: a file is missing or not valid YAML, or Hydra cannot compose the files.
    """
    main = Path(os.path.abspath(main))
    command_line = parse_overrides(overrides)
    with hydra_session() as session:
        session.folders = search_folders(session.canonical(main), command_line.search_path)
        check_keys(command_line, session.has_group)
        config, layers = _compose(main, session, command_line)
    layer_origins = [dict(layer.origins()) for layer in layers]
    unknown = [(path, where[path]) for where in layer_origins for path in outermost_unknown(where)]
    tree = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    for path, _ in unknown:
        drop_at(tree, path)
    origins = {path: where for layer in layer_origins for path, where in layer.items()}
    for key in command_line.keys:  # the items of a list that it replaces have no place any more
        origins = {path: where for path, where in origins.items() if path[: len(key)] != key or not path[-1].isdigit()}
    origins.update(dict.fromkeys(command_line.keys, COMMAND_LINE))
    for deleted in command_line.deleted:
        origins = {path: where for path, where in origins.items() if path[: len(deleted)] != deleted}
    problems = [unknown_key(path, where) for path, where in unknown]
    notices: dict[str, str] = {}
    for layer in layers:
        problems += [*layer.file.problems, *hydra_problems(layer.file, session.files[main])]
        notices |= layer.file.notices
    problems += command_line.problems
    notices |= command_line.notices
    resolved = _resolve(tree, origins, problems)
    return Composed(resolved, origins, tuple(notices.values()), tuple(problems))


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Return where the user set `path` or the nearest section around it; "" if nowhere."""
    return next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), "")


def _compose(main: Path, session: HydraSession, command_line: CommandLine) -> tuple[DictConfig, list[_Layer]]:
    Plugins.instance().register(UserYamlSource)
    ConfigStore.instance().store(name=_RUN, node={"defaults": [*shipped_entries(), MAIN, "_self_"]})
    # Hydra's override grammar escapes a quote with a backslash.
    urls = (f"{UserYamlSource.scheme()}://{path}".replace("'", "\\'") for path in (main, *session.folders))
    sources = ",".join(f"'{url}'" for url in urls)
    overrides = [f"hydra.searchpath=[{sources}]", *command_line.lines]
    try:
        with isolated_hydra(), initialize(config_path=None, version_base="1.3"):
            try:
                config = compose(_RUN, overrides=overrides)
            except (HydraException, OmegaConfBaseException):
                layers = _layers(main, session, overrides)
                raise_problems([problem for layer in layers for problem in layer.wrong_containers()])
                raise
            return config, _layers(main, session, overrides)
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
        raise ConfigError(f"{where}: {reason.replace(MAIN, main.name)}") from error


def _layers(main: Path, session: HydraSession, overrides: list[str]) -> list[_Layer]:
    """Return the user's files in the order in which Hydra merged them."""
    file = session.files[main]
    if len(session.files) == 1 and "@package" not in file.file.text:
        return [_Layer(file, ())]  # the common case, without a second pass over all files
    loader = GlobalHydra.instance().config_loader()
    layers = []
    for default in loader.compute_defaults_list(_RUN, overrides, RunMode.RUN).defaults:
        path = main if default.config_path == MAIN else session.find(default.config_path or "")
        if path in session.files:
            layers.append(_Layer(session.files[path], parts(default.package) if default.package else ()))
    return layers


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


def _missing_default(error: MissingConfigException, session: HydraSession) -> str:
    name = error.missing_cfg_file or ""
    names = sorted(path.stem for folder in session.folders for path in folder.iterdir() if path.suffix in SUFFIXES)
    hint = did_you_mean(name, names, "; did you mean {}?", cutoff=0.5)
    folders = ", ".join(shown(folder) for folder in session.folders)
    where = ""
    for file in session.files.values():
        for index, entry in enumerate(file.tree.get("defaults") or ()):
            if _names(entry, name):
                where = f"{file.file.where(('defaults', str(index)))}: "
    return f"{where}defaults: there is no {name}.yaml in {folders}{hint}"


def _names(entry: object, name: str) -> bool:
    """Return whether an entry of a `defaults` list (`base`, `group: option`, `optional …`) is the config `name`."""
    if isinstance(entry, dict):
        return any(name == f"{str(group).split()[-1].strip('/')}/{option}" for group, option in entry.items())
    return isinstance(entry, str) and entry.split("@")[0].strip("/") == name


def _resolve(tree: dict[str, Any], origins: Mapping[KeyPath, str], problems: list[Problem]) -> dict[str, Any]:
    """Return the tree with `${…}` resolved; a key that cannot be resolved is removed and added to `problems`."""
    while _has_references(tree):
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            path = key_path(error.full_key or "")
            key = schema().owner(path) or path
            if not key:
                raise ConfigError(reason_of(error)) from error
            problems.append(Problem(f"{dotted(key)}: {reason_of(error)}", origin_of(origins, key), keys=(key,)))
            drop_at(tree, key)
        else:
            assert isinstance(resolved, dict)
            return {str(name): value for name, value in resolved.items()}
    return {str(name): value for name, value in tree.items()}


def _has_references(value: object) -> bool:
    """Return whether OmegaConf has something to resolve in a tree, which it takes long to look for."""
    if isinstance(value, str):
        return "${" in value or value == "???"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_references, items))

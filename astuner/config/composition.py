"""From a YAML file and command-line overrides to one tree of values, by Hydra, with the origin of every key."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.config.aliases import Canonical
from astuner.config.hydra_source import MAIN, Session, UserYamlSource, register, session
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.overrides import COMMAND_LINE, CommandLine, check_keys, parse_overrides
from astuner.config.problems import Problem, outermost_unknown, unknown_key
from astuner.config.search_path import SHIPPED_FOLDER, hydra_problems, search_folders
from astuner.config.tree import drop_at
from astuner.config.yaml_file import SUFFIXES, first_line, key_path, place, shown
from astuner.errors import ConfigError

_SHIPPED_ENTRIES = ("verl/verl_default", "trinity/trinity_default", "astuner_default")
_RUN = "astuner_run"
_hydra_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Composed:
    """All layers in one.

    Attributes:
        tree: every value, references resolved, unknown keys left out.
        origins: where the user set a key or section (`file:line`, `command line`); the last place wins.
        notices: what to say about spellings.
        problems: unknown keys, clashing aliases, references that lead nowhere.
    """

    tree: dict[str, Any]
    origins: Mapping[KeyPath, str]
    notices: tuple[str, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One user file and the package (section) that its keys belong under."""

    file: Canonical
    package: KeyPath

    def places(self) -> Iterator[tuple[KeyPath, str]]:
        """Every key that the file sets, and where."""
        for path, line in self.file.lines.items():
            if path[0] not in ("hydra", "defaults"):
                yield (*self.package, *path), place(self.file.file.path, line)


def compose_files(main: Path, overrides: Sequence[str]) -> Composed:
    """Merge the shipped defaults, the files that `main` names in its `defaults`, `main` itself and `overrides`.

    Raises:
        ConfigError: a file is missing or is no YAML, or Hydra cannot compose the files.
    """
    main = Path(os.path.abspath(main))
    command_line = parse_overrides(overrides)
    with session() as current:
        current.folders = search_folders(current.canonical(main), command_line.search_path)
        check_keys(command_line, current.has_group)
        config, layers = _compose(main, current, command_line)
    places = [dict(layer.places()) for layer in layers]
    unknown = [(path, where[path]) for where in places for path in outermost_unknown(where)]
    tree = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    for path, _ in unknown:
        drop_at(tree, path)
    origins = _origins(places, command_line)
    problems = [unknown_key(path, where) for path, where in unknown]
    for layer in layers:
        problems += [*layer.file.problems, *hydra_problems(layer.file, current.files[main])]
    problems += command_line.problems
    resolved = _resolve(tree, origins, problems)
    return Composed(resolved, origins, _notices(layers, command_line), tuple(problems))


def _notices(layers: Sequence[_Layer], command_line: CommandLine) -> tuple[str, ...]:
    """One notice an alias, from the place that was read last."""
    said: dict[str, str] = {}
    for notices in (*(layer.file.notices for layer in layers), command_line.notices):
        said.update(notices)
    return tuple(said.values())


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Where the user set `path`, or the section around it; "" where neither was set."""
    return next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), "")


def _origins(places: Sequence[Mapping[KeyPath, str]], command_line: CommandLine) -> dict[KeyPath, str]:
    origins = {path: where for layer in places for path, where in layer.items()}
    origins.update(dict.fromkeys(command_line.given, COMMAND_LINE))
    for deleted in command_line.deleted:
        origins = {path: where for path, where in origins.items() if path[: len(deleted)] != deleted}
    return origins


def _compose(main: Path, current: Session, command_line: CommandLine) -> tuple[DictConfig, list[_Layer]]:
    register()
    ConfigStore.instance().store(name=_RUN, node={"defaults": [*_SHIPPED_ENTRIES, MAIN, "_self_"]})
    places = ",".join(_quoted(f"{UserYamlSource.scheme()}://{path}") for path in (main, *current.folders))
    overrides = [f"hydra.searchpath=[{places}]", *command_line.lines]
    try:
        with own_hydra(), initialize_config_dir(str(SHIPPED_FOLDER), version_base="1.3"):
            config = compose(_RUN, overrides=overrides)
            return config, _layers(main, current, overrides)
    except MissingConfigException as error:
        raise ConfigError(_missing_default(error, current)) from error
    except RecursionError:
        raise ConfigError(f"{shown(main)}: the files of its defaults lists name each other in a circle") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        # Hydra names the override that it could not apply, and nothing else of the command line.
        reason = _reason(error).replace(MAIN, main.name)
        blamed = any(dotted(key) in reason for key in (*command_line.given, *command_line.deleted))
        raise ConfigError(f"{COMMAND_LINE if blamed else shown(main)}: {reason}") from error


def _layers(main: Path, current: Session, overrides: list[str]) -> list[_Layer]:
    """The user's files in the order in which Hydra merged them."""
    only = current.files[main]
    if len(current.files) == 1 and "@package" not in only.file.text:
        return [_Layer(only, ())]  # the common case, without a second walk through all files
    loader = GlobalHydra.instance().config_loader()
    layers = []
    for default in loader.compute_defaults_list(_RUN, overrides, RunMode.RUN).defaults:
        path = main if default.config_path == MAIN else current.find(default.config_path or "")
        if path in current.files:
            layers.append(_Layer(current.files[path], parts(default.package) if default.package else ()))
    return layers


def _reason(error: Exception) -> str:
    # Hydra hands OmegaConf's errors on as the cause of an error without words.
    said = str(error) or str(error.__cause__)
    return " ".join(line.strip() for line in said.splitlines() if "object_type" not in line)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


@contextmanager
def own_hydra() -> Iterator[None]:
    """Hydra keeps one global state: put aside what a caller may have there, and bring it back."""
    with _hydra_lock:
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            yield
        finally:
            GlobalHydra.instance().clear()
            if outer is not None:
                GlobalHydra.instance().initialize(outer)


def _missing_default(error: MissingConfigException, current: Session) -> str:
    name = error.missing_cfg_file or ""
    beside = sorted(path.stem for folder in current.folders for path in folder.iterdir() if path.suffix in SUFFIXES)
    alike = difflib.get_close_matches(name, beside, n=1, cutoff=0.5)
    hint = f"; did you mean {alike[0]!r}?" if alike else ""
    folders = ", ".join(shown(folder) for folder in current.folders)
    where = ""
    for file in current.files.values():
        for index, entry in enumerate(file.tree.get("defaults") or ()):
            if _names(entry, name):
                where = f"{file.file.where(('defaults', str(index)))}: "
    return f"{where}defaults: there is no {name}.yaml in {folders}{hint}"


def _names(entry: object, name: str) -> bool:
    """Whether an entry of a `defaults` list (`base`, `group: option`, `optional …`) means the config `name`."""
    if isinstance(entry, dict):
        return any(name == f"{str(group).split()[-1].strip('/')}/{option}" for group, option in entry.items())
    return isinstance(entry, str) and entry.split("@")[0].strip("/") == name


def _resolve(tree: dict[str, Any], origins: Mapping[KeyPath, str], problems: list[Problem]) -> dict[str, Any]:
    """Resolve `${…}`; a key whose reference leads nowhere becomes a problem and is left out."""
    while True:
        try:
            resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            path = key_path(error.full_key or "")
            key = schema().owner(path) or path
            if not key:
                raise ConfigError(first_line(error)) from error
            problems.append(Problem(f"{dotted(key)}: {first_line(error)}", origin_of(origins, key), keys=(key,)))
            drop_at(tree, key)
        else:
            assert isinstance(resolved, dict)
            return {str(name): value for name, value in resolved.items()}

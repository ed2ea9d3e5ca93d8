"""Load a run's configuration: shipped defaults, YAML files, command line; typed, checked, with notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astuner.config.aliases import WITHOUT_EFFECT, canonical_values
from astuner.config.composition import compose_files, origin_of
from astuner.config.consistency import inconsistencies
from astuner.config.idle import without_effect
from astuner.config.keys import KeyPath, parts
from astuner.config.problems import Problem, broken_keys, raise_problems
from astuner.config.root import RunConfig
from astuner.config.support import set_aside, unsupported
from astuner.config.tree import set_at
from astuner.config.validation import validate
from astuner.config.yaml_file import shown

_BACKBONE = parts("astuner.backbone")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and what is to be said about it.

    Attributes:
        config: every value, checked; names such as `read_yaml_name` as written (see `resolve_names`).
        path: the YAML file that was asked for.
        notices: one line each, each once: older spellings, keys without effect, keys of another backbone.
        origins: where the user set a key (`file:line`, `command line`), for what only the backbone can judge.
    """

    config: RunConfig
    path: Path
    notices: tuple[str, ...]
    origins: Mapping[KeyPath, str] = field(default_factory=dict)


def load_config(path: Path, overrides: Sequence[str] = (), backbone: str | None = None) -> LoadedConfig:
    """Load the YAML file `path`.

    Args:
        path: a YAML file with an `astuner:` section. Its `defaults` list may name further files beside it; what
            astuner ships as defaults is always loaded first.
        overrides: `key=value` in Hydra's grammar, over the files.
        backbone: over `astuner.backbone`, wherever that is set.

    Raises:
        ConfigError: a file, key or value is wrong. The message has a line for each problem, with its place.
    """
    composed = compose_files(path, overrides)
    origins = dict(composed.origins)
    if backbone is not None:
        set_at(composed.tree, _BACKBONE, backbone)
        origins[_BACKBONE] = "--backbone"
    renamed = [_said(origins, key, text) for key, text in canonical_values(composed.tree)]
    idle = [
        _said(origins, parts(key), f"{key} is accepted for older files and does nothing")
        for key in WITHOUT_EFFECT
        if parts(key) in origins
    ]
    config, wrong = validate(composed.tree, origins)
    problems = [*composed.problems, *wrong]
    broken = broken_keys(problems)
    # What several keys say together is not to be judged while one of them is in doubt.
    clashes = [clash for clash in inconsistencies(config) if broken.isdisjoint(clash.keys)]
    problems += [
        Problem(problem.text, _where(origins, problem, path), problem.keys)
        for problem in (*unsupported(config), *clashes)
    ]
    raise_problems(problems)
    notices = (*composed.notices, *renamed, *idle, *without_effect(config), *set_aside(config))
    return LoadedConfig(config, path, tuple(dict.fromkeys(notices)), origins)


def check_config(config: RunConfig) -> tuple[str, ...]:
    """Check a configuration that was made in Python as `load_config` checks one from files; return the notices.

    Raises:
        ConfigError: something is missing, contradicts something else, or is not offered by the backbone.
    """
    raise_problems([*unsupported(config), *inconsistencies(config)])
    return (*without_effect(config), *set_aside(config))


def resolve_names(config: RunConfig, path: Path, exp_dir: Path | str = "launcher_record") -> RunConfig:
    """Fill in names that depend on where the run was started from.

    Args:
        config: as loaded.
        path: the YAML file; its stem is the name of an experiment called `read_yaml_name`.
        exp_dir: the folder in which an `experiment_dir` of `auto` lies.
    """
    run = config.astuner
    name = path.stem if run.experiment_name == "read_yaml_name" else run.experiment_name
    folder = str(Path(exp_dir) / name) if run.experiment_dir == "auto" else run.experiment_dir
    named = run.model_copy(update={"experiment_name": name, "experiment_dir": folder})
    return config.model_copy(update={"astuner": named})


def _where(origins: Mapping[KeyPath, str], problem: Problem, path: Path) -> str:
    """The place of the first of the problem's keys that the user set, else the file."""
    return next((origins[key] for key in problem.keys if key in origins), shown(path))


def _said(origins: Mapping[KeyPath, str], key: KeyPath, text: str) -> str:
    where = origin_of(origins, key)
    return f"{where}: {text}" if where else text

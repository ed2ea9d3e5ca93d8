"""Load a configuration from YAML files and the command line, or change one from Python, with all checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astuner.config.aliases import WITHOUT_EFFECT, canonical_values
from astuner.config.backbone_choice import BackboneChoice, choose_backbone, with_backbone
from astuner.config.checks import (
    ignored_keys,
    inconsistencies,
    keys_without_effect,
    unsupported_values,
    values_set_aside,
)
from astuner.config.correction_checks import sampling_notices
from astuner.config.hydra_composition import compose_files, origin_of
from astuner.config.keys import KeyPath, parts
from astuner.config.nested_dict import set_at
from astuner.config.problems import Problem, broken_keys, outermost_unknown, raise_problems, unknown_key
from astuner.config.root import RunConfig
from astuner.config.trainer_aliases import take_aliases
from astuner.config.trainer_mapping import trainer_mapping
from astuner.config.validation import validate
from astuner.config.yaml_file import shown
from astuner.system.redaction import learn_secret_settings

_BACKBONE = parts("astuner.backbone")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration with its notices.

    Attributes:
        config: every value; `backbone: auto` and names such as `read_yaml_name` are not resolved (see `resolve_names`).
        backbone: the backbone that runs it.
        path: the YAML file.
        notices: one line each, without duplicates: aliases, keys without effect, keys of another backbone.
        origins: where the user set each key (`file:line`, `command line`), for checks of the backbone.
    """

    config: RunConfig
    backbone: BackboneChoice
    path: Path
    notices: tuple[str, ...]
    origins: Mapping[KeyPath, str] = field(default_factory=dict)


def load_config(path: Path, overrides: Sequence[str] = (), backbone: str | None = None) -> LoadedConfig:
    """Load a YAML file.

    Args:
        path: a YAML file with an `astuner:` section. Its `defaults` list may name other files; the package's defaults
            are always loaded first.
        overrides: `key=value` in Hydra's grammar; they override the files.
        backbone: overrides `astuner.backbone`.

    Raises:
        ConfigError: a file, key or value is invalid. The message has a line for each problem, with its place.
    """
    learn_secret_settings(overrides)
    composed = compose_files(path, overrides)
    origins = dict(composed.origins)
    if backbone is not None:
        set_at(composed.tree, _BACKBONE, backbone)
        origins[_BACKBONE] = "--backbone"
    aliases: list[str] = []
    clashes: list[Problem] = []
    trainer = choose_backbone(validate(composed.tree, origins)[0]).name
    if trainer in ("verl", "trinity"):
        aliases, clashes = take_aliases(composed.tree, origins, trainer_mapping(trainer))
    renamed = [_at_origin(origins, key, text) for key, text in canonical_values(composed.tree)]
    without_effect = [
        _at_origin(origins, parts(key), f"{key} is accepted for older files and has no effect")
        for key in WITHOUT_EFFECT
        if parts(key) in origins
    ]
    config, invalid = validate(composed.tree, origins)
    problems = [*composed.problems, *clashes, *invalid]
    broken = broken_keys(problems)
    choice = choose_backbone(config)
    resolved = with_backbone(config, choice.name)
    # Contradictions between keys cannot be judged while one of the keys is invalid.
    conflicts = [problem for problem in inconsistencies(resolved) if broken.isdisjoint(problem.keys)]
    for problem in (*unsupported_values(resolved), *conflicts):
        where = next((origins[key] for key in problem.keys if key in origins), shown(path))
        problems.append(Problem(problem.text, where, problem.keys))
    raise_problems(problems)
    notices = (*composed.notices, *aliases, *renamed, *without_effect, *_notices(resolved, origins))
    return LoadedConfig(config, choice, path, tuple(dict.fromkeys(notices)), origins)


def check_config(config: RunConfig) -> tuple[str, ...]:
    """Check a configuration that was created in Python as `load_config` does, and return the notices.

    Raises:
        ConfigError: a value is missing, contradicts another value, or is not supported by the backbone.
    """
    config = with_backbone(config, choose_backbone(config).name)
    raise_problems([*unsupported_values(config), *inconsistencies(config)])
    return _notices(config)


def _notices(config: RunConfig, set_keys: Collection[KeyPath] = ()) -> tuple[str, ...]:
    return (
        *values_set_aside(config),
        *keys_without_effect(config, set_keys),
        *ignored_keys(config),
        *sampling_notices(config),
    )


def with_values(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Return a copy of `config` with other values.

    Args:
        config: the configuration.
        values: dotted key (`astuner.model.path`) to value.

    Raises:
        ConfigError: a key is unknown or a value is invalid.
    """
    learn_secret_settings(values)
    paths = {parts(key): value for key, value in values.items()}
    raise_problems([unknown_key(path, "") for path in outermost_unknown(paths)])
    tree = config.model_dump()
    for path, value in paths.items():
        set_at(tree, path, value)
    changed, problems = validate(tree, {})
    raise_problems(problems)
    return changed


def resolve_names(config: RunConfig, path: Path, exp_dir: Path | str = "launcher_record") -> RunConfig:
    """Return a copy of `config` with what depends on the YAML file, the working directory and the machine.

    These are the names of the run and its record, and the backbone that `auto` stands for.

    Args:
        config: as loaded.
        path: the YAML file; its stem replaces the experiment name `read_yaml_name`.
        exp_dir: parent folder of an `experiment_dir` of `auto`.
    """
    run = config.astuner
    name = path.stem if run.experiment_name == "read_yaml_name" else run.experiment_name
    folder = str(Path(exp_dir) / name) if run.experiment_dir == "auto" else run.experiment_dir
    update = {"experiment_name": name, "experiment_dir": folder, "backbone": choose_backbone(config).name}
    resolved = run.model_copy(update=update)
    return config.model_copy(update={"astuner": resolved})


def _at_origin(origins: Mapping[KeyPath, str], key: KeyPath, text: str) -> str:
    where = origin_of(origins, key)
    return f"{where}: {text}" if where else text

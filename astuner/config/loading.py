"""Load a configuration from YAML files and the command line, or change one from Python, with all checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from astuner.config.canonical import with_canonical_values
from astuner.config.composition import compose_files
from astuner.config.consistency import inconsistencies
from astuner.config.keys import KeyPath, dotted, get_at, is_changed, parts, schema, value_at, with_value
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.section import MIN_GPUS_OF_TRINITY, BackboneName
from astuner.config.trainer_mapping import TrainerName, trainer_mapping, with_trainer_aliases
from astuner.config.validation import Draft, Problem, outermost_unknown, raise_problems, unknown_key, validate
from astuner.config.yaml_file import shown
from astuner.errors import ConfigError
from astuner.system.gpus import visible_gpus
from astuner.system.redaction.redactor import learn_secret_settings

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
    draft = compose_files(path, overrides)
    if backbone is not None:
        tree, origins = with_value(draft.tree, _BACKBONE, backbone), {**draft.origins, _BACKBONE: "--backbone"}
        draft = replace(draft, tree=tree, origins=origins)
    draft = with_canonical_values(draft)
    if (trainer := _trainer(draft)) is not None:
        draft = with_trainer_aliases(draft, trainer_mapping(trainer))
    config, invalid = validate(draft.tree, draft.origins)
    choice = choose_backbone(config)
    resolved = with_backbone(config, choice.name)
    problems = [*draft.problems, *invalid]
    broken = {key for problem in problems for key in problem.keys}
    for problem in _conflicts(resolved, broken):
        where = next((draft.origins[key] for key in problem.keys if key in draft.origins), shown(path))
        problems.append(replace(problem, where=where))
    raise_problems(problems)
    told = dict.fromkeys((*draft.notices, *notices(resolved, draft.origins)))
    return LoadedConfig(config, choice, path, tuple(told), draft.origins)


def _trainer(draft: Draft) -> TrainerName | None:
    """Return the trainer that the run uses, whose section may have aliases; None without such a section."""
    name = get_at(draft.tree, _BACKBONE, "auto")
    if name == "auto" and draft.tree.get("trinity"):
        name = choose_backbone(validate(draft.tree, draft.origins)[0]).name
    return name if name in ("verl", "trinity") else None


def check_config(config: RunConfig) -> tuple[str, ...]:
    """Check a configuration that was created in Python as `load_config` does, and return the notices.

    Raises:
        ConfigError: a value is missing, contradicts another value, or is not supported by the backbone.
    """
    config = with_backbone(config, choose_backbone(config).name)
    raise_problems(list(_conflicts(config, set())))
    return tuple(notices(config))


def _conflicts(config: RunConfig, broken: Collection[KeyPath]) -> Iterator[Problem]:
    """Yield the values that the backbone does not support, and the contradictions between keys that are valid."""
    yield from unsupported_values(config)
    yield from (problem for problem in inconsistencies(config) if not any(key in broken for key in problem.keys))


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
        tree = with_value(tree, path, value)
    changed, problems = validate(tree, {})
    raise_problems(problems)
    return changed


def resolve_names(config: RunConfig, path: Path, exp_dir: Path | str = "launcher_record") -> RunConfig:
    """Return a copy of `config` with what depends on the YAML file, the working directory and the machine.

    These are the names of the run and its record, and the backbone that `auto` stands for.

    Args:
        config: as loaded.
        path: the YAML file; its stem replaces the experiment name `read_yaml_name`.
        exp_dir: the experiment folder's parent if `experiment_dir` is `auto`.
    """
    run = config.astuner
    name = path.stem if run.experiment_name == "read_yaml_name" else run.experiment_name
    folder = str(Path(exp_dir) / name) if run.experiment_dir == "auto" else run.experiment_dir
    update = {"experiment_name": name, "experiment_dir": folder, "backbone": choose_backbone(config).name}
    resolved = run.model_copy(update=update)
    return config.model_copy(update={"astuner": resolved})


def unsupported_values(config: RunConfig) -> Iterator[Problem]:
    """Yield the values that the configuration's backbone does not support."""
    backbone = config.astuner.backbone
    for path, key in schema().keys.items():
        value = value_at(config, path)
        for declared in key.unsupported:
            rejected = is_changed(config, path) if declared.values is None else value in declared.values
            if declared.is_error and backbone in declared.by and rejected:
                text = f"{dotted(path)} is {value!r}, which --backbone={backbone} does not support: {declared.why}"
                yield Problem(text, keys=(path,))


def notices(config: RunConfig, set_keys: Collection[KeyPath] = ()) -> Iterator[str]:
    """Yield what the user should know about a valid configuration: values and keys that the run does not use.

    A key that has no effect is listed under the first of its conditions that holds, if it is changed. A key in
    `set_keys` is listed at its default, too, if the condition says so.

    Args:
        config: the configuration, with the backbone chosen.
        set_keys: the keys that the user set.
    """
    backbone = config.astuner.backbone
    without_effect: dict[str, list[str]] = {}
    unused = []
    for path, key in schema().keys.items():
        value, is_set = value_at(config, path), is_changed(config, path)
        condition = next((when for when in key.no_effect if when.holds(config.astuner)), None)
        if condition is None:
            for declared in key.unsupported:
                if not declared.is_error and backbone in declared.by and value in (declared.values or ()):
                    yield f"{dotted(path)}: {value} is ignored: {declared.why}"
        elif is_set or (condition.at_default and path in set_keys):
            without_effect.setdefault(condition.text, []).append(dotted(path))
        if is_set and backbone not in key.used_by:
            unused.append(dotted(path))
    for text, names in without_effect.items():
        yield f"no effect {text}: {', '.join(names)}"
    if unused:
        yield f"not used by {backbone}: {', '.join(unused)}"
    yield from _sampling_notices(config.astuner)


def _sampling_notices(run: AstunerConfig) -> Iterator[str]:
    """Yield a notice if top-p or top-k make the sampler differ from the policy that is trained."""
    rollout = run.rollout
    if run.backbone == "debug" or run.is_supervised or not rollout.is_cut:
        return
    cuts = [f"rollout.top_p is {rollout.top_p:g}"] * (rollout.top_p < 1)
    cuts += [f"rollout.top_k is {rollout.top_k}"] * (rollout.top_k > 0)
    factor = "by a factor that depends on the token" if rollout.top_k > 0 else f"up to {1 / rollout.top_p:.3g} times"
    yield (
        f"{' and '.join(cuts)}: the model samples from a part of its distribution, and a sampled token was more likely "
        f"than the trained policy assumes, {factor}. {_cut_correction(run)}"
    )


def _cut_correction(run: AstunerConfig) -> str:
    """Return whether the correction acts on the difference that top-p and top-k make."""
    correction = run.trainer_common.correction
    remedy = "write top_p: 1.0 and top_k: -1 to sample from the whole distribution"
    if run.backbone == "trinity" or (run.backbone == "verl" and run.rollout.name not in ("auto", "embedded")):
        return f"The engine does not return the probabilities that it sampled with, so nothing corrects this; {remedy}"
    if correction.mode == "none" or (
        correction.mode == "auto" and correction.old_logprobs == "sampler" and run.trainer_common.algorithm.has_ratio
    ):
        return f"Nothing corrects this, because trainer_common.correction is off; {remedy}"
    mode = "token_tis" if correction.mode == "auto" else correction.mode
    where = ", except with vLLM, which does not return the probabilities that it sampled with" * (
        run.backbone == "verl"
    )
    return f"trainer_common.correction ({mode}) corrects this{where}"


@dataclass(frozen=True, slots=True)
class BackboneChoice:
    """The backbone of a run.

    Attributes:
        name: the configured backbone, or the backbone chosen for `auto`.
        reason: the reason for the choice; "" if the configuration names the backbone.
        alternative: how to train without the environment of trinity; "" if trinity was not chosen for `auto`.
    """

    name: BackboneName
    reason: str = ""
    alternative: str = ""

    def __str__(self) -> str:
        return f"{self.name} (auto: {self.reason})" if self.reason else self.name


def choose_backbone(config: RunConfig) -> BackboneChoice:
    """Return the backbone of a run; for `auto`, trinity if it has two or more GPUs and supports the run, else local."""
    run = config.astuner
    if run.backbone != "auto":
        return BackboneChoice(run.backbone)
    gpus, reason = _gpus_of_run(run)
    if gpus < MIN_GPUS_OF_TRINITY:
        return BackboneChoice("local", reason)
    on_local = {problem.keys for problem in unsupported_values(with_backbone(config, "local"))}
    for problem in unsupported_values(with_backbone(config, "trinity")):
        if problem.keys not in on_local:
            key = problem.keys[0]
            return BackboneChoice("local", f"trinity does not support {dotted(key)}: {value_at(config, key)}")
    asked = run.trainer_common.n_gpus_per_node is not None or run.trainer_common.nnodes > 1
    change = " astuner.trainer_common.n_gpus_per_node=1 astuner.trainer_common.nnodes=1" if asked else ""
    return BackboneChoice("trinity", reason, f"to train on one device without it, use --backbone=local{change}")


def with_backbone(config: RunConfig, backbone: BackboneName) -> RunConfig:
    """Return a copy of `config` with another backbone."""
    return config.model_copy(update={"astuner": config.astuner.model_copy(update={"backbone": backbone})})


def check_gpus(run: AstunerConfig, services: Collection[str] = ()) -> None:
    """Check that this machine has the GPUs that a trinity run asks for, unless the run joins a cluster.

    The backbones check everything else about GPUs. This check needs no package of Trinity's environment, so that nobody
    installs the environment for a run that is impossible.

    Args:
        run: the configuration, with the backbone chosen.
        services: names of the services that are started with the run.

    Raises:
        ConfigError: the machine has fewer GPUs.
    """
    asked, here = run.trainer_common.n_gpus_per_node or 1, visible_gpus()
    joins_cluster = run.trainer_common.ray_address is not None or "ray-cluster" in services
    if run.backbone != "trinity" or joins_cluster or asked <= max(here, 1):
        return
    use = f"write {here} or less" if here >= MIN_GPUS_OF_TRINITY else "use the backbone local and remove the key"
    raise ConfigError(
        f"astuner.trainer_common.n_gpus_per_node (n_gpu of AstunerJob) is {asked}, and this machine has "
        f"{_counted(here)}; {use}, or set astuner.trainer_common.ray_address to join a Ray cluster that has them"
    )


def _gpus_of_run(run: AstunerConfig) -> tuple[int, str]:
    """Return the number of GPUs that a run requests or else finds, and the reason in a few words."""
    common = run.trainer_common
    if common.n_gpus_per_node is not None or common.nnodes > 1:
        per_node = common.n_gpus_per_node or max(visible_gpus(), 1)
        asked = per_node * common.nnodes
        return asked, f"n_gpus_per_node × nnodes asks for {_counted(asked)}"
    if common.device == "cpu":
        return 0, "trainer_common.device is cpu"
    here = visible_gpus()
    return here, f"this machine has {_counted(here)}"


def _counted(gpus: int) -> str:
    return "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"

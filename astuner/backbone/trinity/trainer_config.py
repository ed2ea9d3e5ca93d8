"""Trinity's configuration of a run: the run's values and the user's `trinity:` section."""

from __future__ import annotations

import ast
import contextlib
import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.backbone.base import missing_packages
from astuner.backbone.packing.attention import attention_error
from astuner.backbone.training.declarations import engine_argument_errors, field_errors, verl_classes
from astuner.backbone.training.trainer_section import (
    TrainerOverride,
    leaf_overrides,
    leaves,
    override_problem,
    override_problems,
    split_shared_mappings,
    trainer_overrides,
)
from astuner.backbone.trinity.preflight import machine_problems
from astuner.backbone.trinity.rules import TrinityRunFacts
from astuner.config.keys import KeyPath, dotted, parts
from astuner.config.root import RunConfig
from astuner.config.trainer_mapping import trainer_mapping
from astuner.config.validation import Problem, raise_problems
from astuner.errors import BackboneError, did_you_mean, first_line

if TYPE_CHECKING:
    from trinity.common.config import Config

PROJECT, NAME = (str(trainer_mapping("trinity").fixed[key].value) for key in ("project", "name"))
"""Trinity keeps its state in `{checkpoint_root_dir}/{PROJECT}/{NAME}`."""
_TRAINER_CONFIG = ("trainer", "trainer_config")
_SECTIONS = {"model": "HFModelConfig", "actor": "FSDPActorConfig", "ref": "FSDPActorConfig", "rollout": "RolloutConfig"}
"""Sections of `trainer.trainer_config`, and verl's class for each."""
_RENAMED = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
_STRATEGY = ("trainer", "trainer_strategy")
_ENGINE_ARGS = ("explorer", "rollout_model", "extra_engine_args")
_WRAPPER = "actor_rollout_ref"
_ATTENTION = (*_TRAINER_CONFIG, "model", "override_config", "attn_implementation")


def trinity_config(config: RunConfig, facts: TrinityRunFacts) -> Config:
    """Return Trinity's configuration of a run, before Trinity's own check, which contacts the Tinker service."""
    composed = OmegaConf.merge(packaged_config(), compose_trinity_config(config, facts))
    result: Any = OmegaConf.to_object(composed)
    # Trinity's check sets the same folder; its processes read it from their environment before.
    result.log.save_dir = str(Path(result.get_checkpoint_job_dir()) / "log")
    return cast("Config", result)


def check_trinity_config(config: Config) -> Config:
    """Return a configuration as checked and completed by Trinity; raise BackboneError if Trinity rejects it."""
    with _rejections_explained():
        return config.check_and_update()


def check_without_ray(config: Config, *, has_model: bool) -> None:
    """Run Trinity's checks that need neither Ray nor a Tinker server, on a copy of the configuration.

    Args:
        has_model: whether `model.model_path` is the folder or the name of the model, which some checks read.

    Raises:
        BackboneError: Trinity's check failed.
    """
    from trinity.common.config_validator import (
        BufferConfigValidator,
        ModelConfigValidator,
        RayClusterConfigValidator,
        validators,
    )

    uses_tinker = config.model.tinker.enable
    with tempfile.TemporaryDirectory(prefix="astuner-trinity-") as folder:
        # The checks create folders, and rename the run if its folder exists.
        checked = replace(copy.deepcopy(config), checkpoint_root_dir=folder)
        for validator in validators:
            # Later checks need the GPUs that Ray shows. On a Tinker server, Ray is not asked.
            if isinstance(validator, RayClusterConfigValidator) and not uses_tinker:
                return
            if isinstance(validator, ModelConfigValidator) and (uses_tinker or not has_model):
                continue
            if isinstance(validator, BufferConfigValidator) and not has_model:
                return
            with _rejections_explained():
                validator.validate(checked)


@contextlib.contextmanager
def _rejections_explained() -> Iterator[None]:
    try:
        yield
    # Trinity's checks raise errors of many types.
    except Exception as error:
        raise BackboneError(f"Trinity rejected its configuration: {first_line(error)}") from error


def compose_trinity_config(config: RunConfig, facts: TrinityRunFacts) -> dict[str, Any]:
    """Return Trinity's configuration as a nested mapping of plain values; missing keys have Trinity's defaults.

    Args:
        config: the configuration, with the names and folders from `resolve_names`.

    Raises:
        ConfigError: the `trinity:` section has a key that Trinity does not have or that astuner sets, or a value that
            the key cannot have, or a key of astuner does not fit the machine. The message states where each key is set.
        BackboneError: Trinity is not installed.
    """
    packaged, mapping = packaged_config(), trainer_mapping("trinity")
    overrides = trainer_overrides(config.trinity, "trinity", packaged)
    values = mapping.values(config, facts, _machine(facts))
    overrides = list(split_shared_mappings([_without_wrapper(override) for override in overrides], values))
    problems = override_problems(overrides, mapping, values, packaged, facts.origins)
    raise_problems([*problems, *machine_problems(config, facts)])
    raise_problems(list(_invalid_values(overrides, packaged, facts)))
    composed: dict[str, Any] = {}
    for name, value in values.items():
        _set(composed, parts(name), value)
    for override in overrides:
        _set(composed, override.path, override.value)
    return composed


def packaged_config() -> DictConfig:
    """Return Trinity's configuration with the defaults of its classes; raise BackboneError without Trinity."""
    try:
        from trinity.common.config import Config
    except ImportError as error:
        raise missing_packages("trinity", ["trinity"]) from error
    packaged: DictConfig = OmegaConf.structured(Config)
    return packaged


def configured_tinker_service(config: RunConfig) -> str | None:
    """Return the address of the Tinker service in the `trinity:` section (`model.tinker.base_url`), if there is one."""
    values = [value for path, value in leaves(config.trinity) if path == ("model", "tinker", "base_url")]
    return None if not values or values[-1] is None else str(values[-1])


def _machine(facts: TrinityRunFacts) -> Iterator[str]:
    yield "always"
    yield "tinker" if facts.uses_tinker else "gpus"
    if not facts.uses_tinker and not facts.flash_attention:
        yield "gpus_without_flash_attention"


def _without_wrapper(override: TrainerOverride) -> TrainerOverride:
    """Return an override without `actor_rollout_ref`, which Trinity removes from the keys of `trainer_config`."""
    if override.path[:3] == (*_TRAINER_CONFIG, _WRAPPER):
        return replace(override, path=(*_TRAINER_CONFIG, *override.path[3:]))
    value = override.value
    if override.path == _TRAINER_CONFIG and isinstance(value, Mapping) and isinstance(value.get(_WRAPPER), Mapping):
        return replace(override, value={**value[_WRAPPER], **{k: v for k, v in value.items() if k != _WRAPPER}})
    return override


def _invalid_values(
    overrides: list[TrainerOverride], packaged: DictConfig, facts: TrinityRunFacts
) -> Iterator[Problem]:
    for override in leaf_overrides(overrides):
        if override.path == _ATTENTION and not facts.uses_tinker:
            name = dotted(("trinity", *_ATTENTION))
            text = attention_error(name, override.value, flash_attention=facts.flash_attention)
            if text:
                yield override_problem(override, trainer_mapping("trinity"), text, facts.origins)
    for override in overrides:
        for text in _passed_through_errors(override):
            yield override_problem(override, trainer_mapping("trinity"), text, facts.origins)
        tree: dict[str, Any] = {}
        _set(tree, override.path, override.value)
        try:
            OmegaConf.to_object(OmegaConf.merge(packaged, tree))
        except OmegaConfBaseException as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            text = f"trinity.{dotted(override.path)} cannot be {override.value!r}: {reason}; write another value"
            yield override_problem(override, trainer_mapping("trinity"), text, facts.origins)


def _passed_through_errors(override: TrainerOverride) -> Iterator[str]:
    """Yield the errors in values that Trinity passes to verl's classes and to vLLM."""
    path, name = override.path, ("trinity", *override.path)
    if path == _STRATEGY and override.value not in ("fsdp", "fsdp2"):
        reason = "astuner's keys are mapped to verl's FSDP engine"
        yield f"{dotted(name)} is {override.value!r}; expected 'fsdp' or 'fsdp2': {reason}"
    if path[: len(_ENGINE_ARGS)] == _ENGINE_ARGS:
        yield from engine_argument_errors(name[: len(_ENGINE_ARGS) + 1], path[len(_ENGINE_ARGS) :], override.value)
    if path[:2] != _TRAINER_CONFIG:
        return
    if not path[2:]:
        if isinstance(override.value, Mapping):
            for below, value in leaves(override.value):
                yield from _passed_through_errors(replace(override, path=(*path, *below), value=value))
        else:
            yield f"{dotted(name)} is {override.value!r}; expected a section with some of {', '.join(_SECTIONS)}"
    elif path[2] not in _SECTIONS:
        hint = did_you_mean(path[2], _SECTIONS) or f"expected one of {', '.join(_SECTIONS)}"
        yield f"unknown section {dotted(name[:4])!r}; {hint}"
    elif ignored := _ignored_below(path[2:], override.value):
        for key in ignored:
            full = dotted(("trinity", *_TRAINER_CONFIG, *key))
            yield f"{full} has no effect: Trinity sets it from its other keys; remove it"
    # verl renames these keys of the reference model before it converts the section.
    elif (classes := verl_classes()) and path[2:3] + path[3:4] not in {("ref", key) for key in _RENAMED}:
        yield from field_errors(classes, _SECTIONS[path[2]], name[:4], path[3:], override.value)


def _ignored_below(path: KeyPath, value: object) -> list[KeyPath]:
    """Return the ineffective keys in a `trainer_config` section, or `path` itself if it is an ineffective key."""
    below = [(*path, *rest) for rest, _ in leaves(value)] if isinstance(value, Mapping) else [path]
    # verl sets the strategy of FSDP from that of the actor, which is among the ignored keys.
    return [key for key in below if ".".join(key) in _ignored_keys() or key[1:] == ("fsdp_config", "strategy")]


@cache
def _ignored_keys() -> frozenset[str]:
    """Return the keys of `trainer_config` that the installed Trinity ignores."""
    spec = find_spec("trinity")
    file = Path(spec.origin).parent / "trainer" / "verl" / "config.py" if spec and spec.origin else None
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file and file.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FROZEN_KEYS":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _set(tree: dict[str, Any], path: KeyPath, value: object) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value

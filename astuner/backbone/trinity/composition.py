"""From a run's configuration to Trinity's.

What mapping.yaml makes of astuner's keys and what machine.yaml has for the machine, over that the `trinity:` section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from astuner.backbone.handed_through import Given, given_values, problem_with, problems_with
from astuner.backbone.key_mapping import PLAIN
from astuner.backbone.trinity.mapping import machine_mapping, trinity_mapping
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.backbone.trinity.rules import RULES
from astuner.backbone.trinity.unfit import unfit
from astuner.config.keys import KeyPath, dotted, parts, value_at
from astuner.config.problems import Problem, raise_problems
from astuner.config.root import RunConfig
from astuner.errors import BackboneError

PROJECT, NAME = (str(trinity_mapping().fixed[key].value) for key in ("project", "name"))
"""Trinity keeps its state in `{checkpoint_root_dir}/{PROJECT}/{NAME}`."""

_BASE_URL = ("model", "tinker", "base_url")


def compose_trinity_config(config: RunConfig, plan: TrinityPlan) -> dict[str, Any]:
    """Return Trinity's `Config` as a nested mapping of plain values; what it lacks has Trinity's default.

    Args:
        config: as loaded, names resolved.
        plan: what it leaves open.

    Raises:
        ConfigError: the `trinity:` section names a key that Trinity does not have, one that astuner sets, or a value
            that it cannot have; or a key of astuner does not go with the device; with the place of each.
        BackboneError: Trinity is not installed.
    """
    packaged = packaged_config()
    given = list(_beside_ours(given_values(config.trinity, "trinity", packaged)))
    raise_problems([*problems_with(given, trinity_mapping(), packaged, plan.origins), *unfit(config, plan)])
    raise_problems(list(_impossible(given, packaged, plan)))
    composed: dict[str, Any] = {}
    for key, value in {**_mapped(config, plan), **_for_machine(config, plan)}.items():
        _put(composed, parts(key), value)
    for one in given:
        _put(composed, one.path, one.value)
    return composed


def packaged_config() -> DictConfig:
    """Return Trinity's configuration as its classes have it.

    Raises:
        BackboneError: Trinity is not installed.
    """
    try:
        from trinity.common.config import Config
    except ImportError as error:
        raise BackboneError(
            "backbone 'trinity' needs trinity-rft, not installed here; run: astuner install trinity"
        ) from error
    packaged: DictConfig = OmegaConf.structured(Config)
    return packaged


def given_service(config: RunConfig) -> str | None:
    """Return the Tinker service that the `trinity:` section names (`model.tinker.base_url`), if any."""
    found = None
    for path, value in _leaves(config.trinity, ()):
        if path == _BASE_URL:
            found = value
    return found if found is None else str(found)


def _leaves(node: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, (*path, *parts(str(name))))
    else:
        yield path, node


def _beside_ours(given: list[Given]) -> Iterator[Given]:
    """The values, those of a mapping apart where astuner sets some of its keys."""
    ours = [parts(key) for key in trinity_mapping().rules()]
    for one in given:
        if isinstance(one.value, Mapping) and any(path[: len(one.path)] == one.path != path for path in ours):
            for path, value in _leaves(one.value, ()):
                yield replace(one, path=(*one.path, *path), value=value)
        else:
            yield one


def _mapped(config: RunConfig, plan: TrinityPlan) -> dict[str, object]:
    """Trinity key to value, of mapping.yaml."""
    mapping, run = trinity_mapping(), config.astuner
    values: dict[str, object] = {}
    for key, (rule, source) in mapping.rules().items():
        values[key] = _plain(value_at(config, source)) if rule == PLAIN else RULES[rule](run, plan)
    values |= {key: RULES[rule](run, plan) for key, rule in mapping.facts.items()}
    return values | {key: deepcopy(fixed.value) for key, fixed in mapping.fixed.items()}


def _for_machine(config: RunConfig, plan: TrinityPlan) -> Mapping[str, object]:
    machine = machine_mapping()
    if not plan.uses_tinker:
        return {**machine.everywhere, **machine.gpus}
    facts = {key: RULES[rule](config.astuner, plan) for key, rule in machine.tinker_facts.items()}
    return {**machine.everywhere, **machine.tinker, **facts}


def _impossible(given: list[Given], packaged: DictConfig, plan: TrinityPlan) -> Iterator[Problem]:
    """The values that Trinity's classes do not take."""
    for one in given:
        wrapped: dict[str, Any] = {}
        _put(wrapped, one.path, one.value)
        try:
            OmegaConf.to_object(OmegaConf.merge(packaged, wrapped))
        except OmegaConfBaseException as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            text = f"trinity.{dotted(one.path)} cannot be {one.value!r}: {reason}; give another value"
            yield problem_with(one, trinity_mapping(), text, plan.origins)


def _put(tree: dict[str, Any], path: KeyPath, value: object) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value

"""The user's `verl:` or `trinity:` section: its values, checked against the trainer's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from astuner.config.keys import KeyPath, dotted, parts
from astuner.config.trainer_mapping import TrainerMapping
from astuner.config.validation import Problem, origin_of


@dataclass(frozen=True, slots=True)
class TrainerOverride:
    """One value of the section.

    Attributes:
        path: its path in the trainer's configuration.
        value: the value; a mapping if the trainer has no section, or a free-form one, at that path.
        adds: whether it was written with `+`.
        written: the key as written, to look up its line.
    """

    path: KeyPath
    value: object
    adds: bool
    written: KeyPath


def trainer_overrides(section: Mapping[str, object], name: str, packaged: DictConfig) -> list[TrainerOverride]:
    """Return the section's values, whether written nested or with dots.

    Args:
        section: the section of the user's YAML.
        name: its name.
        packaged: the trainer's configuration; only its sections are treated as sections.
    """

    def walk(section: Mapping[str, object], above: TrainerOverride) -> Iterator[TrainerOverride]:
        for key, value in section.items():
            path = (*above.path, *parts(str(key).removeprefix("+")))
            adds = above.adds or str(key).startswith("+")
            override = TrainerOverride(path, value, adds, (*above.written, str(key)))
            if isinstance(value, Mapping) and _names(_node(packaged, path)):
                yield from walk(value, override)
            else:
                yield override

    return list(walk(section, TrainerOverride((), None, adds=False, written=(name,))))


def leaf_overrides(overrides: Iterable[TrainerOverride]) -> Iterator[TrainerOverride]:
    """Yield the overrides, with each mapping split into its single values."""
    for override in overrides:
        for below, value in leaves(override.value):
            yield replace(override, path=(*override.path, *below), value=value)


def split_shared_mappings(
    overrides: Iterable[TrainerOverride], values: Mapping[str, object]
) -> Iterator[TrainerOverride]:
    """Yield the overrides, with a mapping split into its values if astuner sets other keys of that mapping.

    Args:
        overrides: the values of the section.
        values: the values that astuner sets, as `TrainerMapping.values` returns them.
    """
    names = [parts(name.removeprefix("+")) for name in values]
    for override in overrides:
        path = override.path
        if isinstance(override.value, Mapping) and any(name[: len(path)] == path != name for name in names):
            yield from leaf_overrides([override])
        else:
            yield override


def leaves(section: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of each single value in a section, whether written nested or with dots."""
    if isinstance(section, Mapping):
        for name, value in section.items():
            yield from leaves(value, (*path, *parts(str(name).removeprefix("+"))))
    else:
        yield path, section


def override_problems(
    overrides: list[TrainerOverride],
    mapping: TrainerMapping,
    values: Mapping[str, object],
    packaged: DictConfig,
    origins: Mapping[KeyPath, str],
) -> Iterator[Problem]:
    """Yield a problem for each key that the trainer does not have or that astuner sets to another value.

    Args:
        overrides: the values of the section.
        mapping: the keys that astuner sets.
        values: the values that it sets them to, of `TrainerMapping.values`.
        packaged: the trainer's configuration; `+` adds keys unless it was created from classes.
        origins: where the user set each key.
    """
    bare = {name.removeprefix("+"): value for name, value in values.items()}
    for override in overrides:
        text = _reserved(override, mapping, bare) or _unknown(override, mapping.trainer, packaged)
        text = text or _not_a_section(override, mapping.trainer, packaged)
        if text:
            yield override_problem(override, mapping, text, origins)


def override_problem(
    override: TrainerOverride, mapping: TrainerMapping, text: str, origins: Mapping[KeyPath, str]
) -> Problem:
    """Return a problem with one value and where it was set."""
    return Problem(text, origin_of(origins, override.written), keys=((mapping.trainer,),))


def _reserved(override: TrainerOverride, mapping: TrainerMapping, values: Mapping[str, object]) -> str:
    path = override.path
    key, name = dotted(path), dotted((mapping.trainer, *path))
    is_set = bool(mapping.setters(key)) or key in mapping.fixed or key in mapping.facts
    if is_set and key in values and values[key] == override.value:
        return ""
    setters = [dotted(setter) for setter in mapping.setters(key)]
    if setters:
        names = " and ".join(filter(None, (", ".join(setters[:-1]), setters[-1])))
        verb = "sets" if len(setters) == 1 else "set"
        return f"{name} is {override.value!r}, and {names} {verb} it to {values.get(key)!r}; change it there"
    if key in mapping.fixed:
        fixed = mapping.fixed[key]
        return f"{name} is {override.value!r}, but must be {fixed.value!r}: {fixed.why}; remove it"
    if key in mapping.facts:
        return f"{name} is set by astuner for each run; remove it"
    for reserved, why in mapping.reserved.items():
        if path[: len(parts(reserved))] == parts(reserved):
            return f"{name} cannot be set: {why}; remove it"
    return ""


def _unknown(override: TrainerOverride, trainer: str, packaged: DictConfig) -> str:
    path = override.path
    closed = packaged._metadata.object_type is not dict
    in_free_form = (_node(packaged, path[:end]) for end in range(1, len(path)))
    if (
        (override.adds and not closed)
        or path[-1] in _names(_node(packaged, path[:-1]))
        # A section that the trainer leaves empty for the user's keys, such as `engine_kwargs.vllm`.
        or any(isinstance(node, DictConfig) and not _is_null(node) and not _names(node) for node in in_free_form)
    ):
        return ""
    near = _nearest(path, packaged)
    hint = f"did you mean {dotted((trainer, *near))!r}?" if near else f"{trainer} has {', '.join(_names(packaged))}."
    adding = "" if closed else f" (To add a key that {trainer} reads and does not list, put a + in front of it.)"
    return f"unknown key {dotted((trainer, *path))!r}; {hint}{adding}"


def _not_a_section(override: TrainerOverride, trainer: str, packaged: DictConfig) -> str:
    names = _names(_node(packaged, override.path))
    if names and not isinstance(override.value, Mapping):
        name = dotted((trainer, *override.path))
        return f"{name} is {override.value!r}; expected a section with some of {', '.join(names)}"
    return ""


def _nearest(path: KeyPath, packaged: DictConfig) -> KeyPath | None:
    """Return the only key of this last name, else the most similar in the same section, else the most similar."""
    keys = list(_paths(packaged, ()))
    same_name = [key for key in keys if key[-1] == path[-1]]
    if len(same_name) == 1:
        return same_name[0]
    siblings = {key[-1]: key for key in keys if key[:-1] == path[:-1]}
    similar = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if similar:
        return siblings[similar[0]]
    by_name = {dotted(key): key for key in keys}
    similar = difflib.get_close_matches(dotted(path), by_name, n=1, cutoff=0.6)
    return by_name[similar[0]] if similar else None


def _paths(node: object, prefix: KeyPath) -> Iterator[KeyPath]:
    for name in _names(node):
        path = (*prefix, name)
        yield path
        yield from _paths(_node(node, (name,)), path)


def _node(packaged: object, path: KeyPath) -> object:
    """Return the section or value at `path`, with references unresolved; None if there is none."""
    node = packaged
    for part in path:
        if not isinstance(node, DictConfig) or part not in _names(node):
            return None
        node = node._get_node(part)
    return node


def _is_null(section: DictConfig) -> bool:
    return section._is_none() or section._is_interpolation()


def _names(node: object) -> list[str]:
    """Return the keys directly in a section; none for a value, null or a reference."""
    return [str(name) for name in node] if isinstance(node, DictConfig) and not _is_null(node) else []

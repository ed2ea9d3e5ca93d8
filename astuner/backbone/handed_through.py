"""The `verl:` or `trinity:` section: every key checked against that trainer's configuration and against the mapping."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from astuner.backbone.key_mapping import KeyMapping, bare
from astuner.config.composition import origin_of
from astuner.config.keys import KeyPath, dotted, parts
from astuner.config.problems import Problem


@dataclass(frozen=True, slots=True)
class Given:
    """One value of the section.

    Attributes:
        path: in the trainer's configuration.
        value: a mapping where the trainer has none, or a free one, in that place.
        adds: whether it was written with `+`.
        written: the key as written, for finding its line.
    """

    path: KeyPath
    value: object
    adds: bool
    written: KeyPath


def given_values(section: Mapping[str, object], name: str, packaged: DictConfig) -> list[Given]:
    """Return the section's values, whether written nested or with dots.

    Args:
        section: as in the YAML file.
        name: the section's.
        packaged: the trainer's configuration; what it has as a section is one here.
    """
    return list(_walk(section, packaged, Given((), None, adds=False, written=(name,))))


def _walk(section: Mapping[str, object], packaged: DictConfig, above: Given) -> Iterator[Given]:
    for name, value in section.items():
        path = (*above.path, *parts(bare(str(name))))
        adds = above.adds or str(name).startswith("+")
        here = Given(path, value, adds, (*above.written, str(name)))
        node = _node(packaged, path)
        if isinstance(value, Mapping) and isinstance(node, DictConfig) and _names(node):
            yield from _walk(value, packaged, here)
        else:
            yield here


def problems_with(
    given: list[Given], mapping: KeyMapping, packaged: DictConfig, origins: Mapping[KeyPath, str]
) -> Iterator[Problem]:
    """Find the keys that the trainer does not have, and those that astuner sets.

    Args:
        given: of `given_values`.
        mapping: what astuner sets.
        packaged: the trainer's configuration; keys can be added with `+` unless it is made from classes.
        origins: where each key of astuner's files was set.
    """
    for one in given:
        text = _owned(one.path, mapping) or _unknown(one, mapping.trainer, packaged)
        text = text or _no_section(one, mapping.trainer, packaged)
        if text:
            yield problem_with(one, mapping, text, origins)


def problem_with(one: Given, mapping: KeyMapping, text: str, origins: Mapping[KeyPath, str]) -> Problem:
    """A problem with one value, where it was given."""
    return Problem(text, origin_of(origins, one.written), keys=((mapping.trainer,),))


def _owned(path: KeyPath, mapping: KeyMapping) -> str:
    key, name = dotted(path), dotted((mapping.trainer, *path))
    setters = mapping.setters(key)
    if setters:
        return f"{name} is set by {' and '.join(map(dotted, setters))}; change it there"
    if key in mapping.fixed:
        fixed = mapping.fixed[key]
        return f"{name} has to be {fixed.value!r}: {fixed.why}; remove it"
    if key in mapping.facts:
        return f"{name} is set by astuner from what the run is; remove it"
    for own, why in mapping.own.items():
        if path[: len(parts(own))] == parts(own):
            return f"{name} cannot be given: {why}; remove it"
    return ""


def _unknown(one: Given, trainer: str, packaged: DictConfig) -> str:
    closed = packaged._metadata.object_type is not dict
    adds = one.adds and not closed
    if adds or _has(packaged, one.path) or _in_free_section(packaged, one.path):
        return ""
    near = _nearest(one.path, packaged)
    name = f"did you mean {dotted((trainer, *near))!r}?" if near else f"{trainer} has {', '.join(_names(packaged))}."
    adding = "" if closed else f" (One that {trainer} reads without listing it takes a + in front.)"
    return f"unknown key {dotted((trainer, *one.path))!r}; {name}{adding}"


def _in_free_section(packaged: DictConfig, path: KeyPath) -> bool:
    """Whether the key lies in a section that the trainer leaves empty for the user's keys (`engine_kwargs.vllm`)."""
    around = (_node(packaged, path[:end]) for end in range(1, len(path)))
    return any(isinstance(node, DictConfig) and not _is_null(node) and not _names(node) for node in around)


def _no_section(one: Given, trainer: str, packaged: DictConfig) -> str:
    node = _node(packaged, one.path)
    if isinstance(node, DictConfig) and _names(node) and not isinstance(one.value, Mapping):
        name = dotted((trainer, *one.path))
        return f"{name} is {one.value!r}; expected a section with some of {', '.join(_names(node))}"
    return ""


def _nearest(path: KeyPath, packaged: DictConfig) -> KeyPath | None:
    """The only key of this last name, else the most alike in the same section, else the most alike of all."""
    known = list(_paths(packaged, ()))
    namesakes = [other for other in known if other[-1] == path[-1]]
    if len(namesakes) == 1:
        return namesakes[0]
    siblings = {other[-1]: other for other in known if other[:-1] == path[:-1]}
    alike = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if alike:
        return siblings[alike[0]]
    everywhere = {dotted(other): other for other in known}
    far = difflib.get_close_matches(dotted(path), everywhere, n=1, cutoff=0.6)
    return everywhere[far[0]] if far else None


def _paths(node: DictConfig, prefix: KeyPath) -> Iterator[KeyPath]:
    for name in _names(node):
        path = (*prefix, name)
        yield path
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            yield from _paths(child, path)


def _has(packaged: DictConfig, path: KeyPath) -> bool:
    around = _node(packaged, path[:-1])
    return isinstance(around, DictConfig) and path[-1] in _names(around)


def _node(packaged: DictConfig, path: KeyPath) -> object:
    """The section or value at `path`, references left as they are; None where there is none."""
    node: object = packaged
    for part in path:
        if not isinstance(node, DictConfig) or part not in _names(node):
            return None
        node = node._get_node(part)
    return node


def _is_null(section: DictConfig) -> bool:
    return section._is_none() or section._is_interpolation()


def _names(section: DictConfig) -> list[str]:
    """The keys directly in a section; none where it is null or a reference."""
    return [] if _is_null(section) else [str(name) for name in section]

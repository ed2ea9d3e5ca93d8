"""The `verl:` section: every key checked against verl's own configuration, and against what astuner has to set."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig

from astuner.backbone.verl.mapping import bare, verl_mapping
from astuner.config.composition import origin_of
from astuner.config.keys import KeyPath, dotted, parts
from astuner.config.problems import Problem

_SECTION = "verl"


@dataclass(frozen=True, slots=True)
class Given:
    """One value of the `verl:` section.

    Attributes:
        path: in verl's configuration.
        value: a mapping where verl has none, or a free one, in that place.
        adds: whether it was written with `+`.
        written: the key as written, for finding its line.
    """

    path: KeyPath
    value: object
    adds: bool
    written: KeyPath


def given_values(section: Mapping[str, object], packaged: DictConfig) -> list[Given]:
    """Return the section's values, whether written nested or with dots.

    Args:
        section: as in the YAML file.
        packaged: verl's configuration; what it has as a section is one here.
    """
    return list(_walk(section, packaged, Given((), None, adds=False, written=(_SECTION,))))


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


def problems_with(given: list[Given], packaged: DictConfig, origins: Mapping[KeyPath, str]) -> Iterator[Problem]:
    """Find the keys that verl does not have, and those that astuner sets.

    Args:
        given: of `given_values`.
        packaged: verl's configuration.
        origins: where each key of astuner's files was set.
    """
    for one in given:
        text = _owned(one.path) or _unknown(one, packaged) or _no_section(one, packaged)
        if text:
            yield Problem(text, origin_of(origins, one.written), keys=((_SECTION,),))


def _owned(path: KeyPath) -> str:
    mapping, key = verl_mapping(), dotted(path)
    setters = mapping.setters(key)
    if setters:
        return f"{_name(path)} is set by {' and '.join(map(dotted, setters))}; change it there"
    if key in mapping.fixed:
        fixed = mapping.fixed[key]
        return f"{_name(path)} has to be {fixed.value!r}: {fixed.why}; remove it"
    if key in mapping.facts:
        return f"{_name(path)} is set by astuner from what the run is; remove it"
    for own, why in mapping.own.items():
        if path[: len(parts(own))] == parts(own):
            return f"{_name(path)} cannot be given: {why}; remove it"
    return ""


def _unknown(one: Given, packaged: DictConfig) -> str:
    if one.adds or _has(packaged, one.path) or _in_free_section(packaged, one.path):
        return ""
    near = _nearest(one.path, packaged)
    hint = f"did you mean {_name(near)!r}?" if near else f"verl has {', '.join(_names(packaged))}."
    return f"unknown key {_name(one.path)!r}; {hint} (One that verl reads without listing it takes a + in front.)"


def _in_free_section(packaged: DictConfig, path: KeyPath) -> bool:
    """Whether the key lies in a section that verl leaves empty for the user's keys (`engine_kwargs.vllm`)."""
    around = (_node(packaged, path[:end]) for end in range(1, len(path)))
    return any(isinstance(node, DictConfig) and not _is_null(node) and not _names(node) for node in around)


def _no_section(one: Given, packaged: DictConfig) -> str:
    node = _node(packaged, one.path)
    if isinstance(node, DictConfig) and _names(node) and not isinstance(one.value, Mapping):
        return f"{_name(one.path)} is {one.value!r}; expected a section with some of {', '.join(_names(node))}"
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


def _name(path: KeyPath) -> str:
    return dotted((_SECTION, *path))

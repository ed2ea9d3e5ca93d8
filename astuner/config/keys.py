"""The schema as a flat table of keys, the nearest key to a misspelling, and nested mappings by key path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_origin

from astuner.config.root import RunConfig
from astuner.config.section import ALL, BackboneName, Condition, KeyRule, ResumeRule, Section, Unsupported, plain_kinds

KeyPath = tuple[str, ...]
"""A key as its parts, e.g. `("astuner", "model", "path")`; in a free-form section, a part may contain a dot."""


MISSING = object()
"""Sentinel for a missing key where None is a valid value."""


def dotted(path: KeyPath) -> str:
    """Return the key as users write it on the command line."""
    return ".".join(path)


def parts(key: str) -> KeyPath:
    """Return a dotted key's path; the inverse of `dotted` for schema keys."""
    return tuple(key.split("."))


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the schema.

    Attributes:
        path: its path.
        default: its default value.
        doc: its documentation, one paragraph.
        annotation: its type.
        free_form: whether it may be a mapping with arbitrary keys (`verl`, `model.renderer`, …).
        rules: the declarations that apply to it: those of the sections around it, outermost first, then its own.
    """

    path: KeyPath
    default: object
    doc: str
    annotation: Any
    free_form: bool
    rules: tuple[KeyRule, ...]

    @property
    def used_by(self) -> tuple[BackboneName, ...]:
        """The backbones that use the key."""
        return next((rule.used_by for rule in reversed(self.rules) if rule.used_by is not None), ALL)

    @property
    def unsupported(self) -> list[Unsupported]:
        """Values that some backbones do not support."""
        return [values for rule in self.rules for values in rule.unsupported]

    @property
    def resume(self) -> ResumeRule | None:
        """How the key may differ when a run resumes; None if nothing declares it."""
        return next((rule.resume for rule in reversed(self.rules) if rule.resume is not None), None)

    @property
    def no_effect(self) -> list[Condition]:
        """Conditions under which the key has no effect."""
        return [when for rule in self.rules for when in rule.no_effect if when not in self.rules[-1].despite]


@dataclass(frozen=True, slots=True)
class Schema:
    """All keys and sections.

    Attributes:
        keys: every key by path.
        sections: every section by path; the root has the empty path.
        declarations: the declaration of every key and section by path, in schema order.
    """

    keys: Mapping[KeyPath, Key]
    sections: Mapping[KeyPath, type[Section]]
    declarations: Mapping[KeyPath, KeyRule]

    def owner(self, path: KeyPath) -> KeyPath | None:
        """Return the key whose value `path` is, or is part of; None for sections and unknown paths."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.keys:
                return path[:end]
        return None

    def knows(self, path: KeyPath) -> bool:
        """Return whether `path` is a section, a key, or part of a key's value."""
        return path in self.sections or self.owner(path) is not None

    def below(self, prefix: KeyPath) -> Iterator[KeyPath]:
        """Yield the key `prefix`, or all keys of that section."""
        return (path for path in self.keys if path[: len(prefix)] == prefix)


@cache
def schema() -> Schema:
    """Return the table of `RunConfig`'s keys."""
    keys: dict[KeyPath, Key] = {}
    sections: dict[KeyPath, type[Section]] = {}
    declarations: dict[KeyPath, KeyRule] = {}

    def collect(section: type[Section], prefix: KeyPath, rules: tuple[KeyRule, ...]) -> None:
        sections[prefix] = section
        for name, field in section.model_fields.items():
            path = (*prefix, name)
            rule = next((item for item in field.metadata if isinstance(item, KeyRule)), KeyRule())
            chosen_by = dotted((*prefix[1:], section.chosen_by))
            other_variants = tuple(variant.unless(chosen_by) for variant in rule.variant)
            rule = replace(rule, no_effect=(*other_variants, *rule.no_effect))
            declarations[path] = rule
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                collect(kind, path, (*rules, rule))
            else:
                keys[path] = Key(
                    path=path,
                    default=field.get_default(call_default_factory=True, validated_data={}),
                    doc=field.description or "",
                    annotation=kind,
                    free_form=any(get_origin(branch) is dict for branch in plain_kinds(kind)),
                    rules=(*rules, rule),
                )

    collect(RunConfig, (), ())
    return Schema(keys, sections, declarations)


def value_at(config: RunConfig, path: KeyPath) -> object:
    """Return a schema key's value."""
    value: object = config
    for part in path:
        value = getattr(value, part)
    return value


def is_changed(config: RunConfig, path: KeyPath) -> bool:
    """Return whether a key of the schema differs from its default."""
    return value_at(config, path) != schema().keys[path].default


def nearest_key(path: KeyPath) -> str | None:
    """Return the valid key or section that was probably meant, or None.

    It is the only key of the same section with this name as a word of its own (`agentscope_workflow` for `workflow`),
    else the only key with this last name, else the most similar in the same section, else the most similar of all.
    """
    valid = [key for key in (*schema().keys, *schema().sections) if key and key != path[: len(key)]]
    siblings = {key[-1]: key for key in valid if key[:-1] == path[:-1]}
    with_word = [key for name, key in siblings.items() if path[-1] in name.split("_")]
    same_name = [key for key in valid if key[-1] == path[-1]]
    for only in (with_word, same_name):
        if len(only) == 1:
            return dotted(only[0])
    similar = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if similar:
        return dotted(siblings[similar[0]])
    others = same_name or [key for key in valid if key[:-1] != path[:-1]]
    similar = difflib.get_close_matches(dotted(path), map(dotted, others), n=1, cutoff=0.75)
    return similar[0] if similar else None


def get_at(tree: Mapping[str, Any], path: KeyPath, default: object = None) -> Any:
    """Return the value at `path`, or `default`."""
    node: Any = tree
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def with_value(tree: Mapping[str, Any], path: KeyPath, value: object) -> dict[str, Any]:
    """Return a copy of `tree` with another value at `path`; what is not a mapping on the way becomes one."""
    if len(path) > 1:
        below = tree.get(path[0])
        value = with_value(below if isinstance(below, Mapping) else {}, path[1:], value)
    return {**tree, path[0]: value}


def without(tree: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """Return a copy of `tree` without the values at `paths`."""
    below: dict[str, list[KeyPath]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        inner = below.get(str(key), [])  # YAML keys can be numbers; a path has their text
        if () not in inner:
            kept[key] = without(value, inner) if inner and isinstance(value, Mapping) else value
    return kept


def paths_in(value: object, prefix: KeyPath) -> Iterator[KeyPath]:
    """Yield `prefix` and the path of every key below it, outermost first."""
    yield prefix
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths_in(item, (*prefix, str(key)))

"""The schema seen as a flat table of keys: what exists, what it defaults to, what is nearest to a misspelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_origin

from pydantic.fields import FieldInfo

from astuner.config.root import RunConfig
from astuner.config.section import Section, plain_kinds

KeyPath = tuple[str, ...]
"""A key as its parts, e.g. `("astuner", "model", "path")`; a part may itself hold a dot in a free-form section."""


def dotted(path: KeyPath) -> str:
    """The key as users write it on the command line."""
    return ".".join(path)


def parts(key: str) -> KeyPath:
    """The inverse of `dotted` for keys of the schema."""
    return tuple(key.split("."))


@dataclass(frozen=True, slots=True)
class Key:
    """One value of the schema.

    Attributes:
        path: where it stands.
        default: its value when nobody sets it.
        doc: its documentation, one paragraph.
        annotation: its type.
        free_form: whether it may be a mapping with keys of its own (`verl`, `model.renderer` …).
    """

    path: KeyPath
    default: object
    doc: str
    annotation: Any
    free_form: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """All keys by path, and all sections by path (the root is the empty path)."""

    keys: Mapping[KeyPath, Key]
    sections: Mapping[KeyPath, type[Section]]

    def owner(self, path: KeyPath) -> KeyPath | None:
        """The key whose value `path` is, or is part of; None for sections and unknown paths."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.keys:
                return path[:end]
        return None

    def knows(self, path: KeyPath) -> bool:
        """Whether `path` is a section, a key, or part of a key's value."""
        return path in self.sections or self.owner(path) is not None

    def below(self, prefix: KeyPath) -> Iterator[KeyPath]:
        """All keys that are `prefix` or stand in that section."""
        return (path for path in self.keys if path[: len(prefix)] == prefix)


@cache
def schema() -> Schema:
    """The table for `RunConfig`."""
    keys: dict[KeyPath, Key] = {}
    sections: dict[KeyPath, type[Section]] = {}
    _collect(RunConfig, (), keys, sections)
    return Schema(keys, sections)


def _collect(
    section: type[Section], prefix: KeyPath, keys: dict[KeyPath, Key], sections: dict[KeyPath, type[Section]]
) -> None:
    sections[prefix] = section
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            _collect(kind, path, keys, sections)
        else:
            keys[path] = _key(path, field)


def _key(path: KeyPath, field: FieldInfo) -> Key:
    return Key(
        path=path,
        default=field.get_default(call_default_factory=True, validated_data={}),
        doc=field.description or "",
        annotation=field.annotation,
        free_form=any(get_origin(kind) is dict for kind in plain_kinds(field.annotation)),
    )


def value_at(config: RunConfig, path: KeyPath) -> object:
    """The value of a key of the schema."""
    value: object = config
    for part in path:
        value = getattr(value, part)
    return value


def is_changed(config: RunConfig, path: KeyPath) -> bool:
    """Whether a key of the schema has another value than its default."""
    return value_at(config, path) != schema().keys[path].default


def nearest_key(path: KeyPath) -> str | None:
    """The valid key that was probably meant, or None.

    It is the only key of this last name, else the most alike in the same section, else the most alike of all.
    """
    valid = [known for known in (*schema().keys, *schema().sections) if known and known != path[: len(known)]]
    namesakes = [known for known in valid if known[-1] == path[-1]]
    if len(namesakes) == 1:
        return dotted(namesakes[0])
    siblings = {known[-1]: known for known in valid if known[:-1] == path[:-1]}
    alike = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
    if alike:
        return dotted(siblings[alike[0]])
    others = namesakes or [known for known in valid if known[:-1] != path[:-1]]
    far = difflib.get_close_matches(dotted(path), map(dotted, others), n=1, cutoff=0.75)
    return far[0] if far else None


def keys_in(section: KeyPath) -> list[str]:
    """The names that may stand directly in a section."""
    return list(schema().sections[section].model_fields)

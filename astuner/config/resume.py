"""Compares a configuration with an earlier run's, to decide whether the run resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.section import ResumeRule

_REDACTED = "[redacted]"
_MISSING = object()


@dataclass(frozen=True)
class KeyChange:
    """A key whose value differs from that of the earlier run.

    Attributes:
        key: the dotted key.
        earlier, now: the two values.
        rule: how the key may differ.
        allowed: whether the new value follows the rule.
    """

    key: str
    earlier: object
    now: object
    rule: ResumeRule
    allowed: bool

    def __str__(self) -> str:
        note = " (it may only become larger)" if self.rule == "more" and not self.allowed else ""
        return f"{self.key}: {self.earlier!r} → {self.now!r}{note}"


@dataclass(frozen=True)
class Locations:
    """The folders in which relative paths of the two runs are searched.

    Attributes:
        earlier: those of the earlier run.
        now: those of this run.
    """

    earlier: Sequence[Path]
    now: Sequence[Path]


def changed_keys(earlier: Mapping[str, Any], now: Mapping[str, Any], locations: Locations) -> list[KeyChange]:
    """Return the keys whose values differ, in the order of the schema.

    A key that the earlier configuration lacks had its default value then. Values that contain a redacted secret cannot
    be compared and count as equal.

    Args:
        earlier, now: the content of the two `config.yaml`.
        locations: for keys that name files.
    """
    changes = []
    for path, key in schema().keys.items():
        before, after = _value_at(earlier, path), _value_at(now, path)
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        before, after = (default if value is _MISSING else value for value in (before, after))
        for name, old, new in _differences(dotted(path), before, after):
            rule = key.resume or "same"
            if rule == "path" and _name_one_file(old, new, locations):
                continue
            allowed = rule == "any" or (rule == "more" and _limit(new) >= _limit(old))
            changes.append(KeyChange(name, old, new, rule, allowed))
    return changes


def _value_at(tree: object, path: KeyPath) -> object:
    for part in path:
        if not isinstance(tree, Mapping) or part not in tree:
            return _MISSING
        tree = tree[part]
    return tree


def _differences(name: str, before: object, after: object) -> Iterator[tuple[str, object, object]]:
    """Yield the name and the values of each part that differs; the parts of a mapping are compared one by one."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(f"{name}.{key}", before.get(key), after.get(key))
    # True and 1 are equal in Python. 1 and 1.0 are one value of a key.
    elif (isinstance(before, bool) is not isinstance(after, bool) or before != after) and _REDACTED not in str(before):
        yield name, before, after


def _limit(value: object) -> float:
    """Return a maximum as a number; null means no maximum."""
    return float(value) if isinstance(value, int | float) else math.inf


def _name_one_file(before: object, after: object, locations: Locations) -> bool:
    """Return whether two values name the same file or folder, which may have been moved, alone or with its project."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return False
    old_file, _, old_name = before.partition("->")
    new_file, _, new_name = after.partition("->")
    if old_name != new_name or not old_file or not new_file:
        return False
    old_places = [(_absolute(folder, old_file), folder) for folder in (*locations.earlier, *locations.now)]
    new_places = [(_absolute(folder, new_file), folder) for folder in locations.now]
    if {place.resolve() for place, _ in old_places} & {place.resolve() for place, _ in new_places}:
        return True
    inside_old, inside_new = (
        {place.relative_to(folder) for place, folder in places if place.is_relative_to(folder)}
        for places in (old_places, new_places)
    )
    if inside_old & inside_new:
        return True
    is_moved = any(place.exists() for place, _ in new_places) and not any(place.exists() for place, _ in old_places)
    return is_moved and Path(old_file).name == Path(new_file).name


def _absolute(folder: Path, file: str) -> Path:
    return Path(os.path.normpath(folder.absolute() / Path(file).expanduser()))

"""Reading and changing a nested mapping by key path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from astuner.config.keys import KeyPath

MISSING = object()
"""Stands for "no such key" where None is a value."""


def get_at(tree: Mapping[str, Any], path: KeyPath, default: object = None) -> Any:
    """The value at `path`, or `default`."""
    node: Any = tree
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def set_at(tree: dict[str, Any], path: KeyPath, value: object) -> None:
    """Set the value at `path`; what is no mapping on the way is replaced by one."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def drop_at(tree: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at `path`, if there is one."""
    parent = get_at(tree, path[:-1])
    if isinstance(parent, dict):
        # YAML has keys that are numbers; a path has their text.
        for key in [key for key in parent if str(key) == path[-1]]:
            del parent[key]


def paths_in(value: object, prefix: KeyPath) -> Iterator[KeyPath]:
    """`prefix` and the path of every key below it, outermost first."""
    yield prefix
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths_in(item, (*prefix, str(key)))


def without(tree: dict[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """A copy of `tree` without `paths`."""
    copy = deepcopy(tree)
    for path in paths:
        drop_at(copy, path)
    return copy

"""Read and change a nested mapping by key path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from astuner.config.keys import KeyPath

MISSING = object()
"""Sentinel for a missing key where None is a valid value."""


def get_at(tree: Mapping[str, Any], path: KeyPath, default: object = None) -> Any:
    """Return the value at `path`, or `default`."""
    node: Any = tree
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def set_at(tree: dict[str, Any], path: KeyPath, value: object) -> None:
    """Set the value at `path`; values on the way that are not mappings are replaced by mappings."""
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[path[-1]] = value


def drop_at(tree: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at `path`, if there is one."""
    parent = get_at(tree, path[:-1])
    if isinstance(parent, dict):
        # YAML keys can be numbers; a path has their text.
        for key in [key for key in parent if str(key) == path[-1]]:
            del parent[key]


def paths_in(value: object, prefix: KeyPath) -> Iterator[KeyPath]:
    """Yield `prefix` and the path of every key below it, outermost first."""
    yield prefix
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from paths_in(item, (*prefix, str(key)))


def without(tree: dict[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """Return a copy of `tree` without `paths`."""
    copy = deepcopy(tree)
    for path in paths:
        drop_at(copy, path)
    return copy

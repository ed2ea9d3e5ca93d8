"""Nested mappings by key path."""

from __future__ import annotations

from typing import Any

from astuner.config.nested_dict import MISSING, drop_at, get_at, paths_in, set_at, without


def test_reading() -> None:
    tree = {"a": {"b": None, "c": 1}}
    assert get_at(tree, ("a", "c")) == 1
    assert get_at(tree, ("a", "b"), default=MISSING) is None
    assert get_at(tree, ("a", "x"), default=MISSING) is MISSING
    assert get_at(tree, ("a", "c", "d"), default=MISSING) is MISSING


def test_setting_and_dropping() -> None:
    tree: dict[str, Any] = {"a": 1}
    set_at(tree, ("a", "b", "c"), 2)
    assert tree == {"a": {"b": {"c": 2}}}
    drop_at(tree, ("a", "b", "c"))
    drop_at(tree, ("x", "y"))
    assert tree == {"a": {"b": {}}}
    numbered: dict[str, Any] = {"a": {1: "x", 2: "y"}}
    drop_at(numbered, ("a", "1"))
    assert numbered == {"a": {2: "y"}}


def test_a_copy_without_some_keys_leaves_the_tree_alone() -> None:
    tree = {"a": {"b": 1, "c": 2}, "d": 3}
    assert without(tree, [("a", "b"), ("d",)]) == {"a": {"c": 2}}
    assert tree == {"a": {"b": 1, "c": 2}, "d": 3}


def test_all_paths_outermost_first() -> None:
    assert list(paths_in({"b": {"c": [1]}}, ("a",))) == [("a",), ("a", "b"), ("a", "b", "c")]

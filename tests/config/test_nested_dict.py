"""Nested mappings by key path."""

from __future__ import annotations

from astuner.config.keys import MISSING, get_at, paths_in, with_value, without


def test_reading() -> None:
    tree = {"a": {"b": None, "c": 1}}
    assert get_at(tree, ("a", "c")) == 1
    assert get_at(tree, ("a", "b"), default=MISSING) is None
    assert get_at(tree, ("a", "x"), default=MISSING) is MISSING
    assert get_at(tree, ("a", "c", "d"), default=MISSING) is MISSING


def test_a_copy_with_another_value_leaves_the_tree_alone() -> None:
    tree = {"a": 1, "d": {"e": 2}}
    assert with_value(tree, ("a", "b", "c"), 2) == {"a": {"b": {"c": 2}}, "d": {"e": 2}}
    assert with_value(tree, ("d", "f"), 3) == {"a": 1, "d": {"e": 2, "f": 3}}
    assert tree == {"a": 1, "d": {"e": 2}}


def test_a_copy_without_some_keys_leaves_the_tree_alone() -> None:
    tree = {"a": {"b": 1, "c": 2}, "d": 3}
    assert without(tree, [("a", "b"), ("d",)]) == {"a": {"c": 2}}
    assert without(tree, [("a", "b"), ("a", "c"), ("x", "y"), ("d", "z")]) == {"a": {}, "d": 3}
    assert without({"a": {1: "x", 2: "y"}}, [("a", "1")]) == {"a": {2: "y"}}
    assert tree == {"a": {"b": 1, "c": 2}, "d": 3}


def test_all_paths_outermost_first() -> None:
    assert list(paths_in({"b": {"c": [1]}}, ("a",))) == [("a",), ("a", "b"), ("a", "b", "c")]

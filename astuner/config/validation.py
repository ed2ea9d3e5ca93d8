"""From a tree of values to the typed configuration; pydantic's findings become one calm line each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from astuner.config.composition import origin_of
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.problems import Problem
from astuner.config.root import RunConfig
from astuner.config.tree import get_at, without

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a section, that is keys below it",
    "model_attributes_type": "a section, that is keys below it",
    "string_type": "text (put it in quotes if YAML reads it as something else)",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number less than {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
}


def validate(tree: dict[str, Any], origins: Mapping[KeyPath, str]) -> tuple[RunConfig, list[Problem]]:
    """Check types and bounds.

    Returns:
        The configuration, with the default in place of every wrong value, and what was wrong.
    """
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        wrong: dict[KeyPath, list[ErrorDetails]] = {}
        for details in error.errors():
            wrong.setdefault(_place_of(details), []).append(details)
    problems = [_problem(path, found, tree, origins) for path, found in wrong.items()]
    keys = [schema().owner(path) or path for path in wrong]
    return RunConfig.model_validate(without(tree, keys)), problems


def _place_of(details: ErrorDetails) -> KeyPath:
    """The section, key or list item that is wrong; pydantic's location also names branches of a union."""
    path = tuple(str(part) for part in details["loc"])
    key = schema().owner(path)
    if key is None:
        return path
    rest = path[len(key) :]
    return (*key, rest[0]) if rest and rest[0].isdigit() else key


def _problem(path: KeyPath, found: list[ErrorDetails], tree: dict[str, Any], origins: Mapping[KeyPath, str]) -> Problem:
    key = schema().owner(path) or path
    given = found[0]["input"] if path != key else get_at(tree, key)
    expected = " or ".join(dict.fromkeys(_expected(details) for details in found))
    name = dotted(key) if path == key else f"an item of {dotted(key)}"
    text = f"{name} is {given!r}; expected {expected}"
    return Problem(text, origin_of(origins, path), keys=tuple(schema().below(key)))


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return _choice(details)
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**context)
    if kind == "extra_forbidden":  # within a mapping of sections; elsewhere, unknown keys are found before
        return f"nothing named {details['loc'][-1]!r} in it; see its keys in the documentation"
    if kind == "value_error":
        return str(context["error"]).removeprefix("expected ")
    return _EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ").removeprefix("Input should ")


def _choice(details: ErrorDetails) -> str:
    choices = str(details["ctx"]["expected"])
    names = choices.replace("'", "").replace(" or ", ", ").split(", ")
    alike = difflib.get_close_matches(str(details["input"]), names, n=1)
    return f"{choices}; did you mean {alike[0]!r}?" if alike else choices

"""Convert a tree of values to the typed configuration; each of pydantic's errors becomes a one-line problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from astuner.config.hydra_composition import origin_of
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.nested_dict import MISSING, get_at, without
from astuner.config.problems import Problem, accepted_items
from astuner.config.root import RunConfig
from astuner.errors import did_you_mean, short_repr

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
    "model_type": "a section with keys below it",
    "model_attributes_type": "a section with keys below it",
    "string_pattern_mismatch": "letters, digits, underscores, dots and hyphens",
    "string_type": "text (in quotes if YAML reads it as another type)",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("a number greater than {}", "gt"),
    "greater_than_equal": ("a number of at least {}", "ge"),
    "less_than": ("a number less than {}", "lt"),
    "less_than_equal": ("a number of at most {}", "le"),
}


def validate(tree: dict[str, Any], origins: Mapping[KeyPath, str]) -> tuple[RunConfig, list[Problem]]:
    """Check types and bounds.

    Returns:
        The configuration, with the default for every invalid value, and the problems.
    """
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        wrong: dict[KeyPath, list[ErrorDetails]] = {}
        for details in error.errors():
            wrong.setdefault(_path_of(details, tree), []).append(details)
    problems = [_problem(path, errors, tree, origins) for path, errors in wrong.items()]
    keys = [schema().owner(path) or path for path in wrong]
    return RunConfig.model_validate(without(tree, keys)), problems


def _path_of(details: ErrorDetails, tree: Mapping[str, Any]) -> KeyPath:
    """Return the path of the invalid section, key or item; pydantic's location also contains branches of a union."""
    path = tuple(str(part) for part in details["loc"])
    key = schema().owner(path)
    if key is None:
        return path
    result, rest = key, path[len(key) :]
    while rest and _value_at(tree, (*result, rest[0])) is not MISSING:
        result, rest = (*result, rest[0]), rest[1:]
        if rest and result[-1].isdigit():  # the type of an item, where it has several
            rest = rest if _value_at(tree, (*result, rest[0])) is not MISSING else rest[1:]
    return (*result, rest[0]) if rest and rest[0].isdigit() else result


def _value_at(tree: Mapping[str, Any], path: KeyPath) -> Any:
    """Return a key's value, also inside a list of sections; MISSING for list items that are not sections."""
    node: Any = tree
    for part in path:
        if isinstance(node, list):
            items = [item if isinstance(item, Mapping) else MISSING for item in node]
            node = items[int(part)] if part.isdigit() and int(part) < len(items) else MISSING
        else:
            node = node.get(part, MISSING) if isinstance(node, Mapping) else MISSING
    return node


def _problem(
    path: KeyPath, errors: list[ErrorDetails], tree: dict[str, Any], origins: Mapping[KeyPath, str]
) -> Problem:
    key = schema().owner(path) or path
    return Problem(_text(path, key, errors, tree), origin_of(origins, path), keys=tuple(schema().below(key)))


def _text(path: KeyPath, key: KeyPath, errors: list[ErrorDetails], tree: dict[str, Any]) -> str:
    first = errors[0]
    # Only in a mapping of sections: elsewhere, unknown keys are found earlier, and every key has a default.
    if first["type"] == "extra_forbidden":
        names = _names_at(path, key, tree)
        hint = did_you_mean(path[-1], names, show=lambda name: repr(dotted((*path[:-1], name))))
        return f"unknown key {dotted(path)!r}; " + (hint or f"there are {', '.join(names)}")
    if first["type"] == "missing":
        if isinstance(first["loc"][-1], int):  # a list that is too short
            count = len(get_args(schema().keys[key].annotation))
            return f"{dotted(key)} is {short_repr(get_at(tree, key))}; expected a list of {count} items"
        return f"{dotted(path)} has no {first['loc'][-1]}, which is required"
    # A branch that ends with a question, which name was meant, comes last.
    expected = " or ".join(sorted(dict.fromkeys(map(_expected, errors)), key=lambda text: text.endswith("?")))
    if first["loc"][-1] == "[key]":
        return f"a name in {dotted(key)} is {short_repr(first['input'])}; expected {expected}"
    value = _value_at(tree, path)
    if value is MISSING:
        return f"an item of {dotted(path[:-1])} is {short_repr(first['input'])}; expected {expected}"
    if errors[0]["type"] == "list_type":
        expected += accepted_items(key)
    return f"{dotted(path)} is {short_repr(value)}; expected {expected}"


def _names_at(path: KeyPath, key: KeyPath, tree: Mapping[str, Any]) -> list[str]:
    """Return the valid names next to the last part of `path`, where `key` is a mapping or a list with sections."""
    section = get_args(schema().keys[key].annotation)[-1]
    if get_origin(section) is Annotated:  # a list of sections of several types
        kind = _value_at(tree, path[: len(key) + 1])["type"]
        section = next(
            section
            for section in map(_without_metadata, get_args(_without_metadata(section)))
            if kind in get_args(section.model_fields["type"].annotation)
        )
    for part in path[len(key) + 1 : -1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)


def _without_metadata(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "literal_error":
        return _choice(str(details["ctx"]["expected"]), details["input"])
    if kind == "union_tag_invalid":
        return f"a type of {_choice(context['expected_tags'], context['tag'])}"
    if kind == "union_tag_not_found":
        return "a mapping with a type"
    if kind in _BOUNDS:
        text, bound = _BOUNDS[kind]
        return text.format(f"{context[bound]:,.16g}")
    if kind == "value_error":
        return str(context["error"]).removeprefix("expected ")
    return _EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ").removeprefix("Input should ")


def _choice(choices: str, value: object) -> str:
    names = choices.replace("'", "").replace(" or ", ", ").split(", ")
    return choices + did_you_mean(value, names, "; did you mean {}?")

"""Values before validation, their validation, and the problems that are found, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from astuner.config.keys import MISSING, KeyPath, dotted, get_at, nearest_key, parts, schema, without
from astuner.config.root import RunConfig
from astuner.config.section import plain_kinds
from astuner.errors import ConfigError, did_you_mean, short_repr

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


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that the user has to fix.

    Attributes:
        text: what was given, what was expected, and the fix.
        where: `file:line`, `command line`, or "" if it has no place.
        keys: the affected keys; later checks of these keys are skipped.
    """

    text: str
    where: str = ""
    keys: tuple[KeyPath, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration before validation. Each step of `load_config` returns a new one.

    Attributes:
        tree: every value, with references resolved and without unknown keys.
        origins: where the user set a key or section (`file:line`, `command line`); the last place wins.
        notices: notices about aliases.
        problems: unknown keys, conflicting aliases, references that cannot be resolved.
    """

    tree: Mapping[str, Any]
    origins: Mapping[KeyPath, str]
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def origin_of(origins: Mapping[KeyPath, str], path: KeyPath) -> str:
    """Return where the user set `path` or the nearest section around it; "" if nowhere."""
    return next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), "")


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists all problems, if there are any.

    Raises:
        ConfigError: there is at least one problem.
    """
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join((f"{len(lines)} problems in the configuration:", *lines)))


def unknown_key(path: KeyPath, where: str) -> Problem:
    """Return the problem that there is no key `path`, with the nearest key."""
    near = nearest_key(path)
    if near is None:
        section = path[:-1] if path[:-1] in schema().sections else ()
        place = f"section {dotted(section)}" if section else "the top level"
        names = ", ".join(schema().sections[section].model_fields)
        return Problem(f"unknown key {short_repr(dotted(path))}; keys of {place}: {names}", where)
    if near == dotted(path):
        text = f"{near!r} is written as one word; write one level per line, each indented below the last"
    else:
        text = f"unknown key {short_repr(dotted(path))}; did you mean {near!r}?"
    return Problem(text, where, keys=tuple(schema().below(parts(near))))


def accepted_items(path: KeyPath) -> str:
    """Return the items that a list at `path` takes, if they are names, for the end of a message."""
    items = get_args(schema().keys[path].annotation) if path in schema().keys else ()
    names = get_args(items[0]) if len(items) == 1 and get_origin(items[0]) is Literal else ()
    return f" of {', '.join(names)}" if names else ""


def outermost_unknown(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """Return the unknown paths, without those below another unknown path."""
    unknown: list[KeyPath] = []
    for path in paths:
        if not schema().knows(path) and not any(path[: len(outer)] == outer for outer in unknown):
            unknown.append(path)
    return unknown


def wrong_containers(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield each key below `path` that is a list instead of a mapping or the reverse, with a description.

    Hydra cannot merge these. Other wrong values are found by validation.
    """
    expected = ""
    if path in schema().sections:
        expected = "a section with keys below it" if isinstance(value, list) else ""
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from wrong_containers(item, (*path, str(key)))
    elif path in schema().keys:
        default = schema().keys[path].default
        if isinstance(default, dict) and isinstance(value, list):
            expected = "a mapping"
        elif isinstance(default, list | tuple) and isinstance(value, Mapping):
            expected = "a list"
    if expected:
        yield path, f"{dotted(path)} is {short_repr(value)}; expected {expected}{accepted_items(path)}"


def validate(tree: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> tuple[RunConfig, list[Problem]]:
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
    problems = []
    keys = {path: schema().owner(path) or path for path in wrong}
    for path, errors in wrong.items():
        text = _text(path, keys[path], errors, tree)
        problems.append(Problem(text, origin_of(origins, path), keys=tuple(schema().below(keys[path]))))
    return RunConfig.model_validate(without(tree, keys.values())), problems


def _path_of(details: ErrorDetails, tree: Mapping[str, Any]) -> KeyPath:
    """Return the path of the invalid section, key or item; pydantic's location also contains a union's branches."""
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


def _text(path: KeyPath, key: KeyPath, errors: list[ErrorDetails], tree: Mapping[str, Any]) -> str:
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
            for section in plain_kinds(plain_kinds(section)[0])
            if kind in get_args(section.model_fields["type"].annotation)
        )
    for part in path[len(key) + 1 : -1]:
        section = section.model_fields[part].annotation
    return list(section.model_fields)


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

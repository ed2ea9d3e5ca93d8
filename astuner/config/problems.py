"""The problems in a configuration, one line each, and the error that reports all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from astuner.config.keys import KeyPath, dotted, keys_in, nearest_key, parts, schema
from astuner.errors import ConfigError, short_repr


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
        return Problem(f"unknown key {short_repr(dotted(path))}; keys of {place}: {', '.join(keys_in(section))}", where)
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


def broken_keys(problems: Iterable[Problem]) -> set[KeyPath]:
    """Return the keys that problems affect."""
    return {key for problem in problems for key in problem.keys}


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

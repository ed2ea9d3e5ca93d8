"""What is wrong with a configuration, one calm line each, and the error that reports all of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from astuner.config.keys import KeyPath, dotted, keys_in, nearest_key, parts, schema
from astuner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend.

    Attributes:
        text: what was given, what was expected, how to mend it.
        where: `file:line`, `command line`, or "" where it is nowhere in particular.
        keys: the keys it is about; later checks of these keys are skipped.
    """

    text: str
    where: str = ""
    keys: tuple[KeyPath, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error that lists `problems`, if there are any.

    Raises:
        ConfigError: there is at least one.
    """
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0])
    if lines:
        raise ConfigError("\n  ".join((f"{len(lines)} problems in the configuration:", *lines)))


def unknown_key(path: KeyPath, where: str) -> Problem:
    """There is no key `path`; name the nearest that there is."""
    near = nearest_key(path)
    if near is None:
        section = path[:-1] if path[:-1] in schema().sections else ()
        place = f"section {dotted(section)}" if section else "the top level"
        return Problem(f"unknown key {dotted(path)!r}; keys of {place}: {', '.join(keys_in(section))}", where)
    if near == dotted(path):
        text = f"{near!r} is written as one word; write one level a line, each indented below the last"
    else:
        text = f"unknown key {dotted(path)!r}; did you mean {near!r}?"
    return Problem(text, where, keys=tuple(schema().below(parts(near))))


def outermost_unknown(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """The paths that the schema does not know, without those below another of them."""
    unknown: list[KeyPath] = []
    for path in paths:
        if not schema().knows(path) and not any(path[: len(outer)] == outer for outer in unknown):
            unknown.append(path)
    return unknown


def broken_keys(problems: Iterable[Problem]) -> set[KeyPath]:
    """The keys that `problems` are about."""
    return {key for problem in problems for key in problem.keys}

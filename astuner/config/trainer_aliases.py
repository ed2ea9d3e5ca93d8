"""Keys in the `verl:` and `trinity:` sections that name the same thing as an astuner key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from astuner.config.hydra_composition import origin_of
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.nested_dict import MISSING, get_at, set_at
from astuner.config.problems import Problem
from astuner.config.trainer_mapping import SameThing, TrainerMapping


def take_aliases(
    tree: dict[str, Any], origins: dict[KeyPath, str], mapping: TrainerMapping
) -> tuple[list[str], list[Problem]]:
    """Replace keys in a trainer's section by the astuner keys that name the same thing, in place.

    Args:
        tree: the composed tree.
        origins: the place where the user set each key; the astuner key gets its alias's place.
        mapping: the trainer's mapping.

    Returns:
        A notice for each alias, and a problem for each alias that contradicts a key that is also set.
    """
    section, aliases = tree.get(mapping.trainer), mapping.aliases
    notices: list[str] = []
    problems: list[Problem] = []
    taken = list(_pop(section, (mapping.trainer,), aliases)) if isinstance(section, dict) else []
    # Products and quotients are processed last, because their other key may also have an alias.
    for written, name, value in sorted(taken, key=lambda item: bool(aliases[item[1]].other)):
        same = aliases[name]
        where = origin_of(origins, written)
        alias = dotted((mapping.trainer, *parts(name)))
        own = _own_value(tree, same, value)
        if own is MISSING:
            relation = f"{'a multiple' if same.factor else 'a divisor'} of {same.other} ({_present(tree, same)})"
            text = f"{alias} is {value!r}; expected {relation}; change it, or set {dotted(same.keys[0])} instead"
            problems.append(Problem(text, where, keys=same.keys))
            continue
        for key in same.keys:
            if key not in origins:
                set_at(tree, key, own)
                origins[key] = where
                notice = f"{alias} is read as {dotted(key)}; write {dotted(key)}"
                notices.append(f"{where}: {notice}" if where else notice)
            elif get_at(tree, key) != own:
                text = (
                    f"{alias} is {value!r}, and {dotted(key)}, which is the same thing, is {get_at(tree, key)!r} "
                    f"({origins[key]}); remove one of them"
                )
                problems.append(Problem(text, where, keys=(key,)))
    return notices, problems


def _pop(
    section: dict[str, Any], written: KeyPath, aliases: Mapping[str, SameThing]
) -> Iterator[tuple[KeyPath, str, object]]:
    """Remove the aliases from a section, nested or dotted, and yield each one: as written, its name, and its value.

    An alias that is null is the trainer's default and has no effect on the key.
    """
    for key, value in list(section.items()):
        path = (*written, str(key))
        name = ".".join(part.removeprefix("+") for part in path[1:])
        if name in aliases:
            del section[key]
            if value is not None:
                yield path, name, value
        elif isinstance(value, dict) and value:
            yield from _pop(value, path, aliases)
            if not value:
                del section[key]


def _own_value(tree: Mapping[str, Any], same: SameThing, value: object) -> object:
    """Return the value of astuner's key that means the same as a trainer's; MISSING if there is none."""
    if same.values:
        return same.values.get(value, value) if isinstance(value, str) else value
    if not same.other:
        return value
    other = _present(tree, same)
    if type(value) is not int or type(other) is not int or value < 1 or other < 1:
        return value  # reported as a value of astuner's key
    numerator, denominator = (value, other) if same.factor else (other, value)
    return MISSING if numerator % denominator else numerator // denominator


def _present(tree: Mapping[str, Any], same: SameThing) -> object:
    """Return the value of the other key in a product or quotient."""
    key = parts(same.other)
    value = get_at(tree, key, MISSING)
    return schema().keys[key].default if value is MISSING else value

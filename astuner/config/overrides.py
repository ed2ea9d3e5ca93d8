"""Command-line overrides (`astuner.rollout.num_repeat=8`) in Hydra's grammar, checked before Hydra applies them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from astuner.config.aliases import bare_key, canonical_key, key_notice
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.nested_dict import paths_in
from astuner.config.problems import Problem, outermost_unknown, unknown_key, wrong_containers
from astuner.config.yaml_file import MAX_DIGITS, reason_of, too_long
from astuner.errors import short_repr, shorten

COMMAND_LINE = "command line"
_SEARCH_PATH = "hydra.searchpath"
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS},}}")
_PLUGIN_VALUE = re.compile(r"^([^=]+=)([\w./~-]+->\w+)$")


@dataclass(slots=True)
class CommandLine:
    """Parsed overrides.

    Attributes:
        parsed: each override as parsed by Hydra, and its text.
        search_path: entries of `hydra.searchpath=[…]`, if it was given.
        lines: the overrides for Hydra, with canonical keys.
        keys: the keys that they set.
        deleted: the keys that they remove (`~key`).
        notices: alias to the notice about it.
        problems: invalid overrides.
    """

    parsed: list[tuple[Override, str]] = field(default_factory=list)
    search_path: list[str] | None = None
    lines: list[str] = field(default_factory=list)
    keys: list[KeyPath] = field(default_factory=list)
    deleted: list[KeyPath] = field(default_factory=list)
    notices: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def reject(self, text: str, *keys: KeyPath) -> None:
        """Add a problem, about certain keys."""
        self.problems.append(Problem(text, COMMAND_LINE, keys))


def parse_overrides(overrides: Sequence[str]) -> CommandLine:
    """Parse overrides by Hydra's grammar, without a check of their keys."""
    result = CommandLine()
    parser = OverridesParser.create()
    for line in overrides:
        # Hydra's grammar requires quotes around `>`, and a shell removes quotes.
        quoted = _PLUGIN_VALUE.sub(r"\1'\2'", line)
        if digits := _LONG_NUMBER.search(line):
            result.reject(f"{line.partition('=')[0]} {too_long(digits[0])}")
            continue
        try:
            override = parser.parse_override(quoted)
        except HydraException as error:
            result.reject(_not_parsed(line, error))
            continue
        if override.is_sweep_override():
            result.reject(f"{line!r} gives several values; write a list as key=[a,b], text as \"key='a,b'\"")
        elif override.is_hydra_override() and override.key_or_group != _SEARCH_PATH:
            result.reject(f"{override.key_or_group} has no effect; remove it")
        elif override.is_hydra_override():
            value = override.value()
            result.search_path = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        else:
            result.parsed.append((override, quoted))
    return result


def _not_parsed(line: str, error: HydraException) -> str:
    """Return why an override is not `key=value`."""
    key, equals, value = line.partition("=")
    if not equals and schema().knows(canonical_key(parts(key.strip().lstrip("+~")))[0]):
        return f"{short_repr(line)} has no value; write {key.strip()}=VALUE"
    if not equals:
        return f"{short_repr(line)} is not key=value; write KEY=VALUE, without spaces"
    if key != key.strip() or value != value.lstrip():
        return (
            f"{short_repr(line)} has a space beside the equals sign; write {shorten(f'{key.strip()}={value.strip()}')}"
        )
    return f"{short_repr(line)} is not key=value ({shorten(reason_of(error))}); quote a value with special characters"


def check_keys(result: CommandLine, is_group: Callable[[str], bool]) -> None:
    """Fill in the other fields of `result`; `is_group(name)` is whether Hydra has a config group of that name."""
    for override, line in result.parsed:
        if "." not in override.key_or_group and is_group(override.key_or_group):
            result.lines.append(line)
        else:
            _check_key(override, line, result)


def _check_key(override: Override, line: str, result: CommandLine) -> None:
    key, alias = canonical_key(parts(override.key_or_group))
    if alias is not None:
        result.notices[alias.old] = f"{COMMAND_LINE}: {key_notice(alias)}"
    value = override.value()
    if isinstance(value, str):
        key = bare_key(key)
    owner = schema().owner(key)
    if owner is not None and owner != key and not schema().keys[owner].free_form:
        if isinstance(schema().keys[owner].default, list | tuple):
            result.reject(f"{dotted(owner)} is a list, whose items cannot be set one by one; write the whole list")
        else:
            result.reject(f"{dotted(owner)} is a single value; there is no key {key[-1]!r} under it")
        return
    unknown = outermost_unknown(paths_in(value, key))
    if unknown:
        result.problems.extend(unknown_key(path, COMMAND_LINE) for path in unknown)
        return
    if override.is_delete() and len(key) == 1:  # for Hydra, a key without a dot is a config group
        result.reject(f"{line!r} cannot be removed: {key[0]} is a whole section; remove single keys: ~{key[0]}.KEY")
        return
    if not override.is_delete():
        wrong = dict(wrong_containers(value, key))
        if len(key) == 1 and not isinstance(value, dict):  # for Hydra, a key without a dot is a config group
            wrong[key] = f"{key[0]} is {value!r}; expected a section with keys below it: write {key[0]}.KEY=VALUE"
        for path, text in wrong.items():
            result.reject(text, *schema().below(path))
        if wrong:
            return
    # Hydra adds new keys to a mapping only with `++`. The backbone checks the keys of `verl` and `trinity`.
    plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    fills = owner is not None and (owner == key or len(owner) == 1) and schema().keys[owner].free_form
    adds = "++" if plain and fills else ""
    result.lines.append(adds + line.replace(override.key_or_group, dotted(key), 1))
    (result.deleted if override.is_delete() else result.keys).extend(paths_in(value, key))

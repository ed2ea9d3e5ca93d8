"""Command-line overrides (`astuner.rollout.num_repeat=8`): Hydra's grammar, each key checked before Hydra runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from astuner.config.aliases import bare_key, canonical_key, key_notice
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.problems import Problem, outermost_unknown, unknown_key
from astuner.config.tree import paths_in
from astuner.config.yaml_file import first_line

COMMAND_LINE = "command line"
_SEARCH_PATH = "hydra.searchpath"
_PLUGIN_VALUE = re.compile(r"^([^=]+=)([\w./~-]+->\w+)$")


@dataclass(slots=True)
class CommandLine:
    """Overrides, read.

    Attributes:
        parsed: each override as Hydra parsed it, and its text.
        search_path: entries of `hydra.searchpath=[…]`, where that was given.
        lines: the overrides for Hydra, under canonical keys.
        given: the keys that they set.
        deleted: the keys that they remove (`~key`).
        notices: alias -> what to say about it.
        problems: overrides that are wrong.
    """

    parsed: list[tuple[Override, str]] = field(default_factory=list)
    search_path: list[str] | None = None
    lines: list[str] = field(default_factory=list)
    given: list[KeyPath] = field(default_factory=list)
    deleted: list[KeyPath] = field(default_factory=list)
    notices: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, text: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(text, COMMAND_LINE))


def parse_overrides(overrides: Sequence[str]) -> CommandLine:
    """Parse `overrides` by Hydra's grammar; their keys are not looked at yet."""
    result = CommandLine()
    parser = OverridesParser.create()
    for line in overrides:
        # Hydra's grammar wants quotes around `>`, which a shell would take away.
        quoted = _PLUGIN_VALUE.sub(r"\1'\2'", line)
        try:
            override = parser.parse_override(quoted)
        except HydraException as error:
            result.refuse(f"{line!r} is not key=value ({first_line(error)}); quote a value with special characters")
            continue
        if override.is_sweep_override():
            result.refuse(f"{line!r} gives several values; write a list as key=[a,b], text as \"key='a,b'\"")
        elif override.is_hydra_override() and override.key_or_group != _SEARCH_PATH:
            result.refuse(f"{override.key_or_group} has no effect here; remove it")
        elif override.is_hydra_override():
            value = override.value()
            result.search_path = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        else:
            result.parsed.append((override, quoted))
    return result


def check_keys(result: CommandLine, is_group: Callable[[str], bool]) -> None:
    """Fill in the rest of `result`; `is_group(name)` says whether Hydra has a config group of that name."""
    for override, line in result.parsed:
        if "." not in override.key_or_group and is_group(override.key_or_group):
            result.lines.append(line)
        else:
            _read_key(override, line, result)


def _read_key(override: Override, line: str, result: CommandLine) -> None:
    written = parts(override.key_or_group)
    key, alias = canonical_key(written)
    if alias is not None:
        result.notices[alias.old] = f"{COMMAND_LINE}: {key_notice(alias)}"
    value = override.value()
    if isinstance(value, str):
        key = bare_key(key)
    owner = schema().owner(key)
    if owner is not None and owner != key and not schema().keys[owner].free_form:
        result.refuse(f"{dotted(owner)} is a single value; there is no key {key[-1]!r} under it")
        return
    unknown = outermost_unknown(paths_in(value, key))
    if unknown:
        result.problems.extend(unknown_key(path, COMMAND_LINE) for path in unknown)
        return
    # A mapping takes keys that it has not so far only by force. Whether `verl` and `trinity` may have them, they say.
    plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    fills = owner is not None and (owner == key or len(owner) == 1) and schema().keys[owner].free_form
    adds = "++" if plain and fills else ""
    result.lines.append(adds + line.replace(override.key_or_group, dotted(key), 1))
    (result.deleted if override.is_delete() else result.given).extend(paths_in(value, key))

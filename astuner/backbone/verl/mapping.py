"""mapping.yaml and machine.yaml of `default_config/verl`, read: which key of astuner sets which key of verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from astuner.config.keys import KeyPath, parts
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.yaml_file import read_yaml

Kind = Literal["sets", "mirrors", "astuner", "unused", "refused"]

PLAIN = "value"
"""The rule of a verl key that takes astuner's value as it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one key of astuner, or of all keys of a section.

    Attributes:
        path: the key or section.
        kind: how it is treated; `sets` where it sets some verl keys and mirrors others.
        sets: verl key (`+` in front where verl's packaged configuration lacks it) to rule, or `PLAIN`.
        mirrors: the same, of what astuner honours itself.
        text: a word on it, where it has no verl key.
    """

    path: KeyPath
    kind: Kind
    sets: Mapping[str, str]
    mirrors: Mapping[str, str]
    text: str

    @property
    def verl_keys(self) -> Mapping[str, str]:
        """All verl keys that it determines, to rule."""
        return {**self.sets, **self.mirrors}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A verl key on which astuner's trainer stands.

    Attributes:
        value: what it has to be.
        why: the reason.
    """

    value: object
    why: str


@dataclass(frozen=True, slots=True)
class VerlMapping:
    """mapping.yaml.

    Attributes:
        entries: by astuner's key or section.
        facts: verl key to rule.
        fixed: by verl key.
        own: verl key or section to the reason why it cannot be given.
    """

    entries: Mapping[KeyPath, Entry]
    facts: Mapping[str, str]
    fixed: Mapping[str, Fixed]
    own: Mapping[str, str]

    def rules(self) -> dict[str, tuple[str, KeyPath]]:
        """verl key to its rule and to an astuner key that determines it; for a plain copy that is the only one."""
        return {key: (rule, entry.path) for entry in self.entries.values() for key, rule in entry.verl_keys.items()}

    def setters(self, verl_key: str) -> list[KeyPath]:
        """astuner's keys that determine a verl key, written without `+`."""
        return [entry.path for entry in self.entries.values() if verl_key in map(bare, entry.verl_keys)]


@dataclass(frozen=True, slots=True)
class MachineMapping:
    """machine.yaml.

    Attributes:
        everywhere: verl key to value.
        without_flash_attention: the same, where flash-attention does not import, as on every CPU.
        cpu: the same, on a CPU.
        own_ray: the same, on a CPU where Ray is started for the run.
        own_ray_facts: verl key to rule, on a CPU where Ray is started for the run.
    """

    everywhere: Mapping[str, object]
    without_flash_attention: Mapping[str, object]
    cpu: Mapping[str, object]
    own_ray: Mapping[str, object]
    own_ray_facts: Mapping[str, str]


def bare(verl_key: str) -> str:
    """The key without the `+` that adds it."""
    return verl_key.removeprefix("+")


@cache
def verl_mapping() -> VerlMapping:
    """mapping.yaml as shipped."""
    tree = read_yaml(SHIPPED_FOLDER / "verl" / "mapping.yaml").tree
    entries = [_entry(key, treatment) for key, treatment in tree["keys"].items()]
    return VerlMapping(
        entries={entry.path: entry for entry in entries},
        facts=tree["facts"],
        fixed={key: Fixed(**fixed) for key, fixed in tree["fixed"].items()},
        own=tree["own"],
    )


@cache
def machine_mapping() -> MachineMapping:
    """machine.yaml as shipped."""
    return MachineMapping(**read_yaml(SHIPPED_FOLDER / "verl" / "machine.yaml").tree)


def _entry(key: str, treatment: Mapping[str, Any]) -> Entry:
    sets, mirrors = _verl_keys(treatment.get("sets", ())), _verl_keys(treatment.get("mirrors", ()))
    kind = cast(Kind, next(iter(treatment)))
    return Entry(parts(key), kind, sets, mirrors, "" if sets or mirrors else str(treatment[kind]))


def _verl_keys(named: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    return named if isinstance(named, Mapping) else dict.fromkeys(named, PLAIN)

"""A mapping.yaml of `default_config`, read: which key of astuner sets which key of another trainer's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from astuner.config.keys import KeyPath, parts
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.yaml_file import read_yaml

Kind = Literal["sets", "mirrors", "astuner", "unused", "refused"]

PLAIN = "value"
"""The rule of a trainer's key that takes astuner's value as it is."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one key of astuner, or of all keys of a section.

    Attributes:
        path: the key or section.
        kind: how it is treated; `sets` where it sets some of the trainer's keys and mirrors others.
        sets: the trainer's key (`+` in front where its packaged configuration lacks it) to rule, or `PLAIN`.
        mirrors: the same, of what astuner honours itself.
        text: a word on it, where the trainer has no key for it.
    """

    path: KeyPath
    kind: Kind
    sets: Mapping[str, str]
    mirrors: Mapping[str, str]
    text: str

    @property
    def trainer_keys(self) -> Mapping[str, str]:
        """All keys of the trainer that it determines, to rule."""
        return {**self.sets, **self.mirrors}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of the trainer on which astuner's side stands.

    Attributes:
        value: what it has to be.
        why: the reason.
    """

    value: object
    why: str


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """A mapping.yaml.

    Attributes:
        trainer: `verl` or `trinity`: the folder of the file, and the section of a user's YAML that is handed through.
        entries: by astuner's key or section.
        facts: the trainer's key to rule.
        fixed: by the trainer's key.
        own: the trainer's key or section to the reason why it cannot be given.
    """

    trainer: str
    entries: Mapping[KeyPath, Entry]
    facts: Mapping[str, str]
    fixed: Mapping[str, Fixed]
    own: Mapping[str, str]

    def rules(self) -> dict[str, tuple[str, KeyPath]]:
        """The trainer's key to its rule and to an astuner key that determines it, for a plain copy the only one."""
        return {key: (rule, entry.path) for entry in self.entries.values() for key, rule in entry.trainer_keys.items()}

    def setters(self, key: str) -> list[KeyPath]:
        """astuner's keys that determine a key of the trainer, written without `+`."""
        return [entry.path for entry in self.entries.values() if key in map(bare, entry.trainer_keys)]


def bare(key: str) -> str:
    """The trainer's key without the `+` that adds it."""
    return key.removeprefix("+")


def read_mapping(trainer: str) -> KeyMapping:
    """Return `default_config/TRAINER/mapping.yaml` as shipped."""
    tree = read_yaml(SHIPPED_FOLDER / trainer / "mapping.yaml").tree
    entries = [_entry(key, treatment) for key, treatment in tree["keys"].items()]
    return KeyMapping(
        trainer=trainer,
        entries={entry.path: entry for entry in entries},
        facts=tree["facts"],
        fixed={key: Fixed(**fixed) for key, fixed in tree["fixed"].items()},
        own=tree["own"],
    )


def _entry(key: str, treatment: Mapping[str, Any]) -> Entry:
    sets, mirrors = _trainer_keys(treatment.get("sets", ())), _trainer_keys(treatment.get("mirrors", ()))
    kind = cast(Kind, next(iter(treatment)))
    return Entry(parts(key), kind, sets, mirrors, "" if sets or mirrors else str(treatment[kind]))


def _trainer_keys(named: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    return named if isinstance(named, Mapping) else dict.fromkeys(named, PLAIN)

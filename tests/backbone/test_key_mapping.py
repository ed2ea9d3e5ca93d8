"""mapping.yaml and machine.yaml by themselves: complete, and in step with what support.py sets aside and refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from astuner.backbone.key_mapping import PLAIN, Entry, KeyMapping, bare
from astuner.backbone.trinity import mapping as trinity_files
from astuner.backbone.trinity.rules import RULES as TRINITY_RULES
from astuner.backbone.verl import mapping as verl_files
from astuner.backbone.verl.rules import RULES as VERL_RULES
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.support import REFUSALS, SCOPES
from astuner.config.yaml_file import read_yaml

KINDS = {"sets", "mirrors", "astuner", "unused", "refused"}


@dataclass(frozen=True)
class Trainer:
    """A backbone that composes another trainer's configuration."""

    name: str
    mapping: KeyMapping
    machine_facts: Mapping[str, str]
    rules: Mapping[str, Callable[..., object]]

    def entry_of(self, path: KeyPath) -> Entry:
        entries = self.mapping.entries
        (found,) = [entries[path[:end]] for end in range(1, len(path) + 1) if path[:end] in entries]
        return found

    def keys_of(self, kind: str) -> set[KeyPath]:
        return {key for key in schema().keys if self.entry_of(key).kind == kind}


VERL = Trainer("verl", verl_files.verl_mapping(), verl_files.machine_mapping().own_ray_facts, VERL_RULES)
TRINITY = Trainer(
    "trinity", trinity_files.trinity_mapping(), trinity_files.machine_mapping().tinker_facts, TRINITY_RULES
)

pytestmark = pytest.mark.parametrize("trainer", [VERL, TRINITY], ids=["verl", "trinity"])


def test_every_key_stands_in_the_file_exactly_once(trainer: Trainer) -> None:
    for path in schema().keys:
        assert trainer.entry_of(path).kind in KINDS, dotted(path)


def test_the_file_names_only_keys_and_sections_that_exist(trainer: Trainer) -> None:
    for path in trainer.mapping.entries:
        assert path in schema().keys or path in schema().sections, path


def test_a_section_as_a_whole_sets_nothing(trainer: Trainer) -> None:
    """Or a change of one of its keys would change what another stands for."""
    assert all(path in schema().keys for path, entry in trainer.mapping.entries.items() if entry.trainer_keys)


def test_what_is_unused_is_what_support_sets_aside(trainer: Trainer) -> None:
    without_effect = {("astuner", "execute_test"), ("astuner", "execute_testing_lambda")}
    others = [scope for scope in SCOPES if trainer.name not in scope.backbones]
    aside = {key for scope in others for name in scope.keys for key in schema().below(tuple(name.split(".")))}
    assert trainer.keys_of("unused") == aside | without_effect


def test_what_is_refused_is_what_support_refuses(trainer: Trainer) -> None:
    """A key is refused as a whole where all its values but the default are."""
    refused = set()
    for refusal in REFUSALS:
        if trainer.name in refusal.backbones:
            for path in schema().below(tuple(refusal.key.split("."))):
                key = schema().keys[path]
                if refusal.values is None or (key.annotation is bool and refusal.values == (not key.default,)):
                    refused.add(path)
    # Spelled as the only value that is left, it is honoured.
    refused.discard(("astuner", "rollout", "use_agentscope_protocol"))
    assert trainer.keys_of("refused") == refused


def test_every_rule_exists_and_is_used(trainer: Trainer) -> None:
    mapping = trainer.mapping
    named = {rule for entry in mapping.entries.values() for rule in entry.trainer_keys.values()} - {PLAIN}
    assert named | {*mapping.facts.values(), *trainer.machine_facts.values()} == set(trainer.rules)
    assert all(rule.__doc__ for rule in trainer.rules.values())


def test_keys_that_set_the_same_key_do_so_by_the_same_rule(trainer: Trainer) -> None:
    rules: dict[str, set[str]] = {}
    setters: Counter[str] = Counter()
    for entry in trainer.mapping.entries.values():
        for key, rule in entry.trainer_keys.items():
            rules.setdefault(bare(key), set()).add(f"{key}: {rule}")
            setters[bare(key)] += 1
    assert [found for found in rules.values() if len(found) > 1] == []
    entries = trainer.mapping.entries.values()
    plain = {bare(key) for entry in entries for key, rule in entry.trainer_keys.items() if rule == PLAIN}
    assert [key for key in plain if setters[key] > 1] == []


def test_no_key_is_set_in_two_ways(trainer: Trainer) -> None:
    mapping = trainer.mapping
    mapped = {bare(key) for entry in mapping.entries.values() for key in entry.trainer_keys}
    groups = [mapped, set(mapping.facts), set(mapping.fixed)]
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            assert group & other == set()
    every = [key.split(".") for group in groups for key in group]
    assert [(one, other) for one in every for other in every if one != other and other[: len(one)] == one] == []


@pytest.mark.parametrize("name", ["mapping.yaml", "machine.yaml"])
def test_no_line_is_written_twice(trainer: Trainer, name: str) -> None:
    """YAML takes the last of two equal keys without a word."""
    section, keys = "", []
    for line in (SHIPPED_FOLDER / trainer.name / name).read_text(encoding="utf-8").splitlines():
        if line[:1].isalpha():
            section = line
        elif line[:2] == "  " and line[2] not in " #":
            keys.append((section, line.partition(":")[0]))
    assert len(keys) > 10
    assert [key for key, times in Counter(keys).items() if times > 1] == []


def test_reasons_and_words_are_given(trainer: Trainer) -> None:
    mapping = trainer.mapping
    assert all(bool(entry.text) is not bool(entry.trainer_keys) for entry in mapping.entries.values())
    assert all(bool(entry.trainer_keys) is (entry.kind in ("sets", "mirrors")) for entry in mapping.entries.values())
    assert all(fixed.why for fixed in mapping.fixed.values())
    assert all(mapping.own.values())
    tree = read_yaml(SHIPPED_FOLDER / trainer.name / "mapping.yaml").tree
    assert tree.keys() == {"keys", "facts", "fixed", "own"}

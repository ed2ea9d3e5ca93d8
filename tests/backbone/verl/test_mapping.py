"""mapping.yaml and machine.yaml by themselves: complete, and in step with what support.py sets aside and refuses."""

from __future__ import annotations

from collections import Counter

import pytest

from astuner.backbone.key_mapping import PLAIN, Entry, bare
from astuner.backbone.verl.mapping import machine_mapping, verl_mapping
from astuner.backbone.verl.rules import RULES
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.support import REFUSALS, SCOPES
from astuner.config.yaml_file import read_yaml

KINDS = {"sets", "mirrors", "astuner", "unused", "refused"}


def entry_of(path: KeyPath) -> Entry:
    entries = verl_mapping().entries
    (found,) = [entries[path[:end]] for end in range(1, len(path) + 1) if path[:end] in entries]
    return found


@pytest.mark.parametrize("path", schema().keys, ids=dotted)
def test_every_key_stands_in_the_file_exactly_once(path: KeyPath) -> None:
    assert entry_of(path).kind in KINDS


def test_the_file_names_only_keys_and_sections_that_exist() -> None:
    for path in verl_mapping().entries:
        assert path in schema().keys or path in schema().sections, path


def test_a_section_as_a_whole_sets_nothing() -> None:
    """Or a change of one of its keys would change what another stands for."""
    assert all(path in schema().keys for path, entry in verl_mapping().entries.items() if entry.trainer_keys)


def test_what_is_unused_is_what_support_sets_aside() -> None:
    without_effect = {("astuner", "execute_test"), ("astuner", "execute_testing_lambda")}
    others = [scope for scope in SCOPES if "verl" not in scope.backbones]
    aside = {
        key for scope in others for name in scope.keys for key in schema().below(tuple(name.split(".")))
    } | without_effect
    assert {key for key in schema().keys if entry_of(key).kind == "unused"} == aside


def test_what_is_refused_is_what_support_refuses() -> None:
    """A key is refused as a whole where all its values but the default are."""
    refused = set()
    for refusal in REFUSALS:
        if "verl" in refusal.backbones:
            for key in schema().below(tuple(refusal.key.split("."))):
                only_other = (
                    refusal.values == (not schema().keys[key].default,) and schema().keys[key].annotation is bool
                )
                if refusal.values is None or only_other:
                    refused.add(key)
    # Spelled as the only value that is left, it is honoured.
    refused.discard(("astuner", "rollout", "use_agentscope_protocol"))
    assert {key for key in schema().keys if entry_of(key).kind == "refused"} == refused


def test_every_rule_exists_and_is_used() -> None:
    mapping, machine = verl_mapping(), machine_mapping()
    named = {rule for entry in mapping.entries.values() for rule in entry.trainer_keys.values()} - {PLAIN}
    named |= set(mapping.facts.values()) | set(machine.own_ray_facts.values())
    assert named == set(RULES)
    assert all(rule.__doc__ for rule in RULES.values())


def test_keys_that_set_the_same_verl_key_do_so_by_the_same_rule() -> None:
    rules: dict[str, set[str]] = {}
    setters: Counter[str] = Counter()
    for entry in verl_mapping().entries.values():
        for key, rule in entry.trainer_keys.items():
            rules.setdefault(bare(key), set()).add(f"{key}: {rule}")
            setters[bare(key)] += 1
    assert [found for found in rules.values() if len(found) > 1] == []
    plain = {
        bare(key)
        for entry in verl_mapping().entries.values()
        for key, rule in entry.trainer_keys.items()
        if rule == PLAIN
    }
    assert [key for key in plain if setters[key] > 1] == []


def test_no_verl_key_is_set_in_two_ways() -> None:
    mapping = verl_mapping()
    mapped = {bare(key) for entry in mapping.entries.values() for key in entry.trainer_keys}
    groups = [mapped, set(mapping.facts), set(mapping.fixed)]
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            assert group & other == set()


@pytest.mark.parametrize("name", ["mapping.yaml", "machine.yaml"])
def test_no_line_is_written_twice(name: str) -> None:
    """YAML takes the last of two equal keys without a word."""
    lines = (SHIPPED_FOLDER / "verl" / name).read_text(encoding="utf-8").splitlines()
    keys = [line.partition(":")[0] for line in lines if line[:2] == "  " and line[2] not in " #"]
    assert len(keys) > 10
    assert [key for key, times in Counter(keys).items() if times > 1] == []


def test_reasons_and_words_are_given() -> None:
    mapping = verl_mapping()
    assert all(bool(entry.text) is not bool(entry.trainer_keys) for entry in mapping.entries.values())
    assert all(bool(entry.trainer_keys) is (entry.kind in ("sets", "mirrors")) for entry in mapping.entries.values())
    assert all(fixed.why for fixed in mapping.fixed.values())
    assert all(mapping.own.values())
    assert read_yaml(SHIPPED_FOLDER / "verl" / "mapping.yaml").tree.keys() == {"keys", "facts", "fixed", "own"}

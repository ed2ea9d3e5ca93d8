"""The declarations of the keys for verl and Trinity, and fixed_settings.yaml: complete and without contradictions."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from importlib import import_module

import pytest

from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.section import KeyRule, TrainerKey
from astuner.config.trainer_mapping import TrainerMapping, TrainerName, trainer_mapping
from astuner.config.yaml_file import SHIPPED_FOLDER, read_yaml

pytestmark = pytest.mark.parametrize("trainer", ["verl", "trinity"])


def rule_names(trainer: TrainerName) -> set[str]:
    """The functions of the backbone's `rules` module that take a configuration and run facts."""
    module = import_module(f"astuner.backbone.{trainer}.rules")
    functions = inspect.getmembers(module, inspect.isfunction)
    return {
        name
        for name, function in functions
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and list(inspect.signature(function).parameters) == ["config", "facts"]
    }


def rejected_as_a_whole(path: KeyPath, trainer: TrainerName) -> bool:
    """Whether the trainer's backbone supports only the default of a key."""
    key = schema().keys[path]
    return any(
        trainer in declared.by
        and (declared.values is None or (key.annotation is bool and declared.values == (not key.default,)))
        for declared in key.unsupported
    )


def all_keys(mapping: TrainerMapping) -> list[TrainerKey]:
    return [key for keys in mapping.trainer_keys.values() for key in keys]


def test_every_key_states_what_it_becomes(trainer: TrainerName) -> None:
    """If this fails for a new key: add `verl=` and `trinity=` (or `trainers=`) to its `key(...)`, or `used_by=`."""
    for path, key in schema().keys.items():
        declared = any(getattr(rule, trainer) is not None for rule in key.rules)
        unused = trainer not in key.used_by
        assert declared or unused or rejected_as_a_whole(path, trainer), dotted(path)


def test_only_keys_determine_keys_of_the_trainer(trainer: TrainerName) -> None:
    """A section that did would make each of its keys determine the value."""
    assert set(trainer_mapping(trainer).trainer_keys) <= set(schema().keys)


def test_ignored_and_rejected_keys_determine_nothing(trainer: TrainerName) -> None:
    for path in trainer_mapping(trainer).trainer_keys:
        assert trainer in schema().keys[path].used_by, path
        assert not rejected_as_a_whole(path, trainer), path


def test_every_rule_exists_and_is_used(trainer: TrainerName) -> None:
    mapping = trainer_mapping(trainer)
    used = {key.rule for key in all_keys(mapping)} - {None}
    used |= {*mapping.facts.values(), *(rule for group in mapping.machine.values() for rule in group.rules.values())}
    assert used == rule_names(trainer)
    assert all(mapping.rule(str(name)).__doc__ for name in used)


def test_keys_that_determine_the_same_key_do_so_by_the_same_rule(trainer: TrainerName) -> None:
    rules: dict[str, set[tuple[str, str | None]]] = {}
    setters: Counter[str] = Counter()
    for key in all_keys(trainer_mapping(trainer)):
        rules.setdefault(key.bare_name, set()).add((key.name, key.rule))
        setters[key.bare_name] += 1
    assert [declared for declared in rules.values() if len(declared) > 1] == []
    copied = {name for name, declared in rules.items() for _, rule in declared if rule is None}
    assert [name for name in copied if setters[name] > 1] == []


def test_each_rule_is_declared_by_every_key_that_it_reads(trainer: TrainerName) -> None:
    """Else the error for a trainer key in the user's section would name only some of the keys to change."""
    mapping, module = trainer_mapping(trainer), import_module(f"astuner.backbone.{trainer}.rules")
    declared: dict[str, set[str]] = {}
    for path, keys in mapping.trainer_keys.items():
        for key in keys:
            declared.setdefault(str(key.rule), set()).add(dotted(path))
    functions = {
        node.name: node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)
    }
    # The device and the Ray cluster decide how a value is computed; they are not the keys to change it.
    context = {"astuner.trainer_common.device", "astuner.trainer_common.ray_address", "astuner.model.dtype"}
    for name, paths in declared.items():
        if name in functions:
            source = ast.unparse(functions[name])
            read = {f"astuner.{match}" for match in re.findall(r"config\.([a-z_]+(?:\.[a-z_]+)+)", source)}
            read = {key for key in read if tuple(key.split(".")) in schema().keys}
            assert read - context <= paths, name


def test_no_key_is_set_in_two_ways(trainer: TrainerName) -> None:
    mapping = trainer_mapping(trainer)
    groups = [{key.bare_name for key in all_keys(mapping)}, set(mapping.facts), set(mapping.fixed)]
    for index, group in enumerate(groups):
        for other in groups[index + 1 :]:
            assert group & other == set()
    names = [tuple(name.split(".")) for group in groups for name in group]
    assert [(name, other) for name in names for other in names if name != other and other[: len(name)] == name] == []


def test_no_line_of_the_file_is_written_twice(trainer: TrainerName) -> None:
    """YAML takes the last of two equal keys without an error."""
    keys, path = [], {0: ""}
    for line in (SHIPPED_FOLDER / trainer / "fixed_settings.yaml").read_text(encoding="utf-8").splitlines():
        match = re.match(r"( *)([^\s#][^:]*):", line)
        if match:
            depth = len(match[1])
            path = {level: name for level, name in path.items() if level < depth} | {depth: match[2]}
            keys.append(tuple(path.values()))
    assert len(keys) > 30
    assert [key for key, times in Counter(keys).items() if times > 1] == []


def test_every_setting_has_a_reason(trainer: TrainerName) -> None:
    mapping = trainer_mapping(trainer)
    assert all(fixed.why for fixed in mapping.fixed.values())
    assert all(mapping.reserved.values())
    assert all(group.when for group in mapping.machine.values())
    assert all(use.strip() for use in mapping.uses.values() if isinstance(use, str))
    tree = read_yaml(SHIPPED_FOLDER / trainer / "fixed_settings.yaml").tree
    assert tree.keys() == {"facts", "fixed", "reserved", "aliases", "machine"}


def test_a_declaration_is_kept_with_the_field(trainer: TrainerName) -> None:
    rule = schema().declarations["astuner", "trainer_common", "optim", "lr"]
    assert isinstance(rule, KeyRule)
    assert getattr(rule, trainer)[0].name.endswith(".lr")

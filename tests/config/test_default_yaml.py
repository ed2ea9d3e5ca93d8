"""The shipped default files: generated from the schema, complete, and equal to it."""

from __future__ import annotations

import yaml

from astuner.config.default_yaml import DEFAULT_YAML, default_yaml, main
from astuner.config.keys import schema
from astuner.config.root import RunConfig
from astuner.config.search_path import SHIPPED_FOLDER
from astuner.config.yaml_file import read_yaml


def test_the_shipped_file_is_the_generated_one() -> None:
    """If this fails: `python -m astuner.config.default_yaml`."""
    assert DEFAULT_YAML.read_text(encoding="utf-8") == default_yaml()


def test_it_holds_every_key_with_its_default() -> None:
    file = read_yaml(DEFAULT_YAML)
    assert RunConfig.model_validate(file.tree) == RunConfig()
    for key in schema().keys:
        if key[0] == "astuner":
            assert key in file.lines, key


def test_every_key_stands_under_its_documentation() -> None:
    lines = default_yaml().splitlines()
    file = read_yaml(DEFAULT_YAML)
    for path, line in file.lines.items():
        if path in schema().keys or path in schema().sections:
            assert lines[line - 2].lstrip().startswith("# "), path


def test_other_readers_of_yaml_read_the_same_numbers() -> None:
    tree = yaml.safe_load(default_yaml())
    assert tree["astuner"]["trainer_common"]["optim"]["lr"] == 1e-6


def test_the_command_writes_the_file() -> None:
    before = DEFAULT_YAML.read_bytes()
    main()
    assert DEFAULT_YAML.read_bytes() == before


def test_the_sections_of_other_trainers_are_empty() -> None:
    assert read_yaml(SHIPPED_FOLDER / "verl" / "verl_default.yaml").tree == {"verl": {}}
    assert read_yaml(SHIPPED_FOLDER / "trinity" / "trinity_default.yaml").tree == {"trinity": {}}

"""The lists `task_reader.mixture` and `task_reader.filters`: what is wrong in an entry is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from astuner.config.data import MixturePart, part_names
from astuner.config.loading import load_config
from astuner.config.yaml_file import to_yaml
from astuner.errors import ConfigError

Write = Callable[..., Path]
SECTION = "  task_reader:\n"


def loads(write: Write, minimal: str, text: str, *overrides: str) -> Path:
    path = write(minimal + SECTION + "".join(f"    {line}\n" for line in text.splitlines()))
    load_config(path, overrides)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type: jsonl", r"task_reader\.type is 'jsonl'; expected .*'mixture' or a class, `package\.module->Class`$"),
        ("type: random_dumy", r"expected .*a class, .* or 'env_service', .*; did you mean 'random_dummy'\?$"),
        ("filters: [length]", r"an item of astuner\.task_reader\.filters is 'length'; expected a mapping with a type"),
        ("filters: [{max: 3}]", r"filters\.0 is \{'max': 3\}; expected a mapping with a type$"),
        ("filters: [{type: length, max: 3}, {type: lenght}]",
         r"filters\.1 is \{'type': 'lenght'\}; expected a type of 'length', .*; did you mean 'length'\?$"),
        ("filters: [{type: length, max: x}]", r"filters\.0\.max is 'x'; expected a whole number$"),
        ("filters: [{type: length, maxx: 3}]", r"'.*filters\.0\.maxx'; did you mean '.*filters\.0\.max'\?$"),
        ("filters: [{type: difficulty, retry: 3}]", r"filters\.0\.retry'; did you mean '.*filters\.0\.retry_after'\?$"),
        ("filters: [{type: length}]", r"filters\.0 is \{'type': 'length'\}; expected min or max$"),
        ("filters: [{type: regex}]", r"filters\.0 has no pattern, which is required$"),
        ("filters: [{type: regex, pattern: '('}]", r"filters\.0\.pattern is '\('; expected a regular expression of "),
        ("filters: {type: regex}", r"filters is \{'type': 'regex'\}; expected a list$"),
        ("filters: [{type: function, function: f}]", r"filters\.0\.function is 'f'; expected a function, `package\.m"),
        ("filters: [{type: difficulty}, {type: difficulty}]", r"has 2 filters of type difficulty; expected at most"),
        ("type: mixture", r"task_reader\.type is mixture and no reader is named; add entries such as"),
        ("type: mixture\nmixture: [{weight: 1}]", r"mixture\.0 has no type, which is required$"),
        ("type: mixture\nmixture: [{type: mixture}]", r"mixture\.0\.type is 'mixture'; expected .*'random_dummy'"),
        ("type: mixture\nmixture: [{type: random_dummy, weight: 0}]", r"mixture\.0\.weight is 0; expected a number gr"),
        ("type: mixture\nmixture: [{type: dataset_file}]",
         r"mixture\.0 has type dataset_file and no dataset_file\.training\.file_path"),
        ("type: mixture\nmixture: [{type: dataset_file, dataset_file: {training: {file_pat: a}}}]",
         r"unknown key '.*mixture\.0\.dataset_file\.training\.file_pat'; did you mean '.*training\.file_path'\?$"),
        ("type: mixture\nmixture: [{type: random_dummy, name: a/b}]",
         r"mixture\.0\.name is 'a/b'; expected letters, digits, underscores, dots and hyphens$"),
        ("type: mixture\nmixture: [{type: random_dummy, name: a}, {type: random_dummy, name: a}]",
         r"two entries of astuner\.task_reader\.mixture have the name 'a'"),
        ("type: mixture\nmixture: [{type: random_dummy, random_dummy: {min_words: 9, max_words: 3}}]",
         r"mixture\.0\.random_dummy is .*; expected min_words not above max_words$"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_entry_is_named(write: Write, minimal: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        loads(write, minimal, text)
    assert "run.yaml:" in str(caught.value)


@pytest.mark.parametrize("text", ["filters: [{type: difficulty}]", "curriculum: {enable: true}"])
def test_supervised_training_has_no_success(write: Write, minimal: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"depends on the success of episodes, and algorithm sft has none"):
        loads(write, minimal, text, "astuner.trainer_common.algorithm=sft")


def test_entries_survive_the_record(write: Write, minimal: str, tmp_path: Path) -> None:
    text = """\
type: mixture
mixture:
  - {type: random_dummy, weight: 3}
  - {type: own.readers->Mine, name: mine, options: {path: "a${b}"}}
filters:
  - {type: length, unit: tokens, max: 9}
  - {type: deduplicate}
  - {type: regex, pattern: '\\d+$', action: drop}
  - {type: function, function: own.filters->keep, validation: true}
  - {type: difficulty, retry_after: 5}
curriculum: {enable: true}
"""
    text = text.replace("${b}", "b")
    loaded = load_config(loads(write, minimal, text)).config
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(loaded))
    assert load_config(again).config == loaded
    reader = loaded.astuner.task_reader
    assert [entry.type for entry in reader.filters] == [item["type"] for item in yaml.safe_load(text)["filters"]]
    assert [part.weight for part in reader.mixture] == [3.0, 1.0]


def test_names_of_readers_without_a_name() -> None:
    types = ["random_dummy", "a.b->Mine", "c->Mine", "random_dummy"]
    parts = [MixturePart.model_validate({"type": name}) for name in types]
    parts.append(MixturePart(type="a->B", name="random_dummy-2"))
    assert part_names(parts) == ["random_dummy", "Mine", "Mine-2", "random_dummy-3", "random_dummy-2"]

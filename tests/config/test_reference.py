"""The generated files: the default YAML and the docs' tables of keys are complete and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from astuner.config.canonical import ALIASES
from astuner.config.keys import dotted, schema
from astuner.config.root import RunConfig
from astuner.config.trainer_mapping import TrainerName, trainer_mapping
from astuner.config.yaml_file import SHIPPED_FOLDER, read_yaml
from astuner.errors import ConfigError
from docs.key_tables import DEFAULT_YAML, KEY_PARTS, PAGES, default_yaml, update_page, with_generated_parts

DOCS = Path(__file__).parents[2] / "docs/en"
EMPTY = "".join(f"<!-- generated: {name} -->\n<!-- end of {name} -->\n" for name in KEY_PARTS)


def test_the_default_yaml_is_up_to_date() -> None:
    """If this fails, run `make generated`."""
    assert DEFAULT_YAML.read_text(encoding="utf-8") == default_yaml()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    """If this fails, run `make generated`."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == with_generated_parts(page, PAGES[name])


def test_the_default_yaml_has_every_key_with_its_default() -> None:
    file = read_yaml(DEFAULT_YAML)
    assert RunConfig.model_validate(file.tree) == RunConfig()
    for key in schema().keys:
        if key[0] == "astuner":
            assert key in file.lines, key


def test_in_the_default_yaml_every_key_is_under_its_documentation() -> None:
    lines = default_yaml().splitlines()
    file = read_yaml(DEFAULT_YAML)
    for path, line in file.lines.items():
        if path in schema().keys or path in schema().sections:
            assert lines[line - 2].lstrip().startswith("# "), path


def test_other_readers_of_yaml_read_the_same_numbers() -> None:
    tree = yaml.safe_load(default_yaml())
    assert tree["astuner"]["trainer_common"]["optim"]["lr"] == 1e-6


def test_the_sections_of_other_trainers_are_empty() -> None:
    assert read_yaml(SHIPPED_FOLDER / "verl" / "verl_default.yaml").tree == {"verl": {}}
    assert read_yaml(SHIPPED_FOLDER / "trinity" / "trinity_default.yaml").tree == {"trinity": {}}


def test_every_key_has_a_row_with_its_documentation() -> None:
    headings = [part.partition("\n") for part in KEY_PARTS["keys"]().split("### ")[1:]]
    rows = {heading: table for heading, _, table in headings}
    for path, key in schema().keys.items():
        heading = dotted(path[:2]) if path[:2] in schema().sections else path[0]
        if len(path) == 1:
            heading = "Sections of other backbones"
        name = dotted(path) if len(path) == 1 else dotted(path).removeprefix(f"{heading}.")
        (row,) = [line for line in rows[heading].splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith(f"| {key.doc.replace('|', chr(92) + '|')} |")


@pytest.mark.parametrize(
    "row",
    [
        "| `top_p` | number > 0 and ≤ 1 | `1.0` | all | Nucleus mass in training. |",
        "| `total_training_steps` | whole number > 0 or null | `null` | local, trinity, verl |",
        "| `compute_madness_checklist` | list of `nonsense`, `broken_characters`, `repetition`, `random_letters`, "
        '`word_salad`, `mixed_scripts`, `wrong_toolcall`, `language_switch` | `["nonsense"]` | all |',
        "| `optim.betas` | list: number ≥ 0 and < 1; number ≥ 0 and < 1 | `[0.9, 0.999]` |",
        '| `path` | text | `""` |',
        "| `renderer` | text or mapping | `auto` |",
        "| `lora.target_modules` | text or list of text | `all-linear` |",
        "| `context_tracker_type` | `linear`, `sliding_window`, `linear_think`, `auto_context` | `linear` |",
        "| `device` | `auto`, `cpu`, `cuda` | `auto` | all |",
        "| `debugger_port` | whole number ≥ 1024 and ≤ 65535 | `5678` | local, trinity, verl |",
        "| **`multi_turn`** |  |  |  | Limits of an episode. |",
    ],
)
def test_a_row_describes_values_and_backbones(row: str) -> None:
    assert row in KEY_PARTS["keys"]()


def test_every_alias_and_unsupported_value_has_a_row() -> None:
    for alias in ALIASES:
        assert f"| `{alias.old}` | `{alias.new}` |" in KEY_PARTS["aliases"]()
    table = KEY_PARTS["unsupported"]()
    for path, rule in schema().declarations.items():
        for declared in rule.unsupported:
            assert f"| `{dotted(path)}` |" in table
            assert declared.why in table


@pytest.mark.parametrize("trainer", ["verl", "trinity"])
def test_a_trainers_page_has_every_key(trainer: TrainerName) -> None:
    mapping, parts = trainer_mapping(trainer), PAGES[f"backbone_{trainer}_keys.md"]
    mapped, rest, reserved = parts["mapped"](), parts["handled"]() + parts["unsupported"](), parts["reserved"]()
    for path, use in mapping.uses.items():
        name = f"`{'.'.join(path).removeprefix('astuner.')}`"
        assert (name in rest) if isinstance(use, str) else (name in mapped), name
        assert isinstance(use, str) or all(f"`{key.bare_name}`" in mapped for key in use)
    assert all(f"`{name}`" in parts["same"]() for name in mapping.aliases)
    others = {*mapping.fixed, *mapping.facts, *mapping.reserved} - mapping.aliases.keys()
    assert all(f"`{name}`" in reserved for name in others)
    machine = parts["machine"]()
    names = [name for group in mapping.machine.values() for name in (*group.values, *group.rules)]
    assert all(f"`{name.removeprefix('+')}`" in machine for name in names)


def test_text_around_the_parts_is_kept() -> None:
    page = f"# Title\n{EMPTY}the end\n"
    text = with_generated_parts(page, KEY_PARTS)
    assert text.startswith("# Title\n<!-- generated:")
    assert text.endswith("the end\n")
    assert with_generated_parts(text, KEY_PARTS) == text


def test_a_page_with_a_missing_or_unknown_part_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has no part keys; add `<!-- generated: keys -->`"):
        with_generated_parts(EMPTY.replace("keys", "aliases"), KEY_PARTS)
    with pytest.raises(ConfigError, match="no generated part 'colours'; there are keys, "):
        with_generated_parts(f"{EMPTY}<!-- generated: colours -->\n<!-- end of colours -->\n", KEY_PARTS)


def test_a_page_is_updated_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY)
    update_page(page, KEY_PARTS)
    assert page.read_text(encoding="utf-8") == with_generated_parts(EMPTY, KEY_PARTS)

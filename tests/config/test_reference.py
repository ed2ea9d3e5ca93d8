"""The tables of docs/en/configuration.md: generated, complete, and up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.config.aliases import ALIASES
from astuner.config.keys import dotted, schema
from astuner.config.reference import PARTS, main, with_generated_parts
from astuner.config.support import REFUSALS, SCOPES
from astuner.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs/en/configuration.md"
EMPTY = "".join(f"<!-- generated: {name} -->\n<!-- end of {name} -->\n" for name in PARTS)


def test_the_page_is_up_to_date() -> None:
    """If this fails: `python -m astuner.config.reference docs/en/configuration.md`."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_generated_parts(page)


def test_every_key_has_a_row_with_its_documentation() -> None:
    headings = [part.partition("\n") for part in PARTS["keys"]().split("### ")[1:]]
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
        "| `top_p` | number > 0 and ≤ 1 | `1.0` | Nucleus mass in training. |",
        "| `total_training_steps` | whole number > 0 or null | `null` |",
        '| `compute_madness_checklist` | list of `nonsense`, `wrong_toolcall` | `["nonsense"]` |',
        "| `optim.betas` | list: number ≥ 0 and < 1; number ≥ 0 and < 1 | `[0.9, 0.999]` |",
        '| `path` | text | `""` |',
        "| `renderer` | text or mapping | `auto` |",
        "| `lora.target_modules` | text or list of text | `all-linear` |",
        "| `context_tracker_type` | `linear` | `linear` |",
        "| **`multi_turn`** |  |  | Bounds on an episode. |",
    ],
)
def test_values_are_said_in_words(row: str) -> None:
    assert row in PARTS["keys"]()


def test_every_alias_scope_and_refusal_has_a_row() -> None:
    for alias in ALIASES:
        assert f"| `{alias.old}` | `{alias.new}` |" in PARTS["aliases"]()
    scopes = PARTS["scopes"]()
    assert all(f"`{key}`" in scopes for scope in SCOPES for key in scope.keys)
    refusals = PARTS["refusals"]()
    assert all(f"| `{refusal.key}` |" in refusals and refusal.why in refusals for refusal in REFUSALS)


def test_text_around_the_parts_stays() -> None:
    page = f"# Title\n{EMPTY}the end\n"
    made = with_generated_parts(page)
    assert made.startswith("# Title\n<!-- generated:")
    assert made.endswith("the end\n")
    assert with_generated_parts(made) == made


def test_a_page_without_a_part_or_with_an_unknown_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no part keys; put `<!-- generated: keys -->`"):
        with_generated_parts(EMPTY.replace("keys", "aliases"))
    with pytest.raises(ConfigError, match="no generated part 'colours'; there are aliases, "):
        with_generated_parts(f"{EMPTY}<!-- generated: colours -->\n<!-- end of colours -->\n")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(EMPTY)
    main([str(page)])
    assert page.read_text(encoding="utf-8") == with_generated_parts(EMPTY)

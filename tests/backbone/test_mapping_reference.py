"""The tables of a trainer's page in the docs are those of its mapping."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.backbone.key_mapping import KeyMapping, bare
from astuner.backbone.trinity import reference as trinity
from astuner.backbone.trinity.mapping import trinity_mapping
from astuner.backbone.verl import reference as verl
from astuner.backbone.verl.mapping import verl_mapping
from astuner.config.reference import Parts, main, with_generated_parts

DOCS = Path(__file__).parents[2] / "docs/en"

each = pytest.mark.parametrize(
    ("backbone", "mapping", "parts"),
    [("verl", verl_mapping(), verl.PARTS), ("trinity", trinity_mapping(), trinity.PARTS)],
    ids=["verl", "trinity"],
)


@each
def test_the_page_is_up_to_date(backbone: str, mapping: KeyMapping, parts: Parts) -> None:
    """If this fails: `python -m astuner.backbone.{backbone}.reference docs/en/backbone_{backbone}.md`."""
    page = (DOCS / f"backbone_{backbone}.md").read_text(encoding="utf-8")
    assert page == with_generated_parts(page, parts)


@each
def test_every_key_has_its_place(backbone: str, mapping: KeyMapping, parts: Parts) -> None:
    mapped, rest = parts["mapping"](), parts["handled"]() + parts["refused"]()
    for path, entry in mapping.entries.items():
        name = f"`{'.'.join(path).removeprefix('astuner.')}`"
        assert (name in mapped) is bool(entry.trainer_keys)
        assert (name in rest) or entry.trainer_keys, name
        assert all(f"`{bare(key)}`" in mapped for key in entry.trainer_keys)
    owned = parts["owned"]()
    assert all(f"`{key}`" in owned for key in (*mapping.fixed, *mapping.facts, *mapping.own))


@each
def test_the_command_writes_the_page(backbone: str, mapping: KeyMapping, parts: Parts, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    empty = "".join(f"<!-- generated: {name} -->\n<!-- end of {name} -->\n" for name in parts)
    page.write_text(empty)
    main([str(page)], parts)
    assert page.read_text(encoding="utf-8") == with_generated_parts(empty, parts)

"""The tables of docs/en/backbone_trinity.md are those of the mapping."""

from __future__ import annotations

from pathlib import Path

from astuner.backbone.key_mapping import bare
from astuner.backbone.trinity.mapping import trinity_mapping
from astuner.backbone.trinity.reference import PARTS
from astuner.config.reference import main, with_generated_parts

PAGE = Path(__file__).parents[3] / "docs/en/backbone_trinity.md"


def test_the_page_is_up_to_date() -> None:
    """If this fails: `python -m astuner.backbone.trinity.reference docs/en/backbone_trinity.md`."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_generated_parts(page, PARTS)


def test_every_key_has_its_place() -> None:
    mapped, rest = PARTS["mapping"](), PARTS["handled"]() + PARTS["refused"]()
    for path, entry in trinity_mapping().entries.items():
        name = f"`{'.'.join(path).removeprefix('astuner.')}`"
        assert (name in mapped) is bool(entry.trainer_keys)
        assert (name in rest) or entry.trainer_keys, name
        assert all(f"`{bare(key)}`" in mapped for key in entry.trainer_keys)
    owned = PARTS["owned"]()
    assert all(
        f"`{key}`" in owned for key in (*trinity_mapping().fixed, *trinity_mapping().facts, *trinity_mapping().own)
    )


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    empty = "".join(f"<!-- generated: {name} -->\n<!-- end of {name} -->\n" for name in PARTS)
    page.write_text(empty)
    main([str(page)], PARTS)
    assert page.read_text(encoding="utf-8") == with_generated_parts(empty, PARTS)

"""The documentation site: its navigation is complete, and loads nothing from other servers. `make docs` builds it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(section: Any) -> Iterator[str]:
    """Yield the files of a section of the navigation."""
    if isinstance(section, str):
        yield section
    else:
        for part in section.values() if isinstance(section, dict) else section:
            yield from pages(part)


def test_the_navigation_has_each_page_once() -> None:
    listed = list(pages(CONFIG["nav"]))
    guide = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/en").glob("*.md")}
    assert guide - set(listed) == set(), "add these pages to nav in mkdocs.yml"
    assert set(listed) - guide == {"README.md", "CHANGELOG.md"}
    assert len(listed) == len(set(listed))


def test_each_drawing_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/en").glob("*.md"))
    for drawing in (ROOT / "docs/assets").glob("*.svg"):
        assert f"(../assets/{drawing.name})" in text


def test_the_site_is_built_without_a_broken_link_or_another_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    home = (tmp_path / "index.html").read_text()
    loaded = re.findall(
        r'<(?:script|img|iframe)[^>]* src="([^"]*)"|<link[^>]* rel="stylesheet"[^>]* href="([^"]*)"', home
    )
    assert loaded
    for address in ("".join(found) for found in loaded):
        assert (tmp_path / address).is_file(), address
    assert (tmp_path / "search/search_index.json").is_file()
    assert (tmp_path / "tutorial/example_werewolves/werewolves_tiny.yaml.html").is_file()
    assert "trainable_targets" in (tmp_path / "tutorial/example_werewolves/werewolves_tiny.yaml.html").read_text()
    assert (tmp_path / "docs/assets/gateway.svg").is_file()

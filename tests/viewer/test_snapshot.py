"""`astuner export --format snapshot`: a folder that a browser opens without a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.cli.main import astuner
from astuner.errors import RecordError
from astuner.run_record import read_index
from astuner.viewer.export import STATIC, bundle
from astuner.viewer.index import key_of
from tests.viewer.browser import Page, leaving
from tests.viewer.test_hostile import NAME, assert_harmless, hostile

__all__ = ["hostile"]


def export(*arguments: object) -> None:
    astuner.main(["export", "--format", "snapshot", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Iterator[Page]:
    with leaving(browser) as driver:
        yield Page(driver, (tmp_path / "snapshot/index.html").as_uri())


def test_a_snapshot_opens_from_files(
    page: Page, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(runs / "first", "--out", tmp_path / "snapshot", "--episodes", 7)
    before, after = capsys.readouterr().err.splitlines()
    assert "7 of 18 episodes in full" in before
    assert re.fullmatch(r"wrote \d+ files, [\d.]+ [kM]B; open .*index.html in a browser", after)
    page.driver.get(page.address)
    page.wait(lambda: page.all(".charts canvas"))
    assert "7 of 18 episodes in full" in page.element("aside").text
    assert page.texts("h1")[0].startswith("first")
    page.wait(lambda: page.all(".heat td"))
    page.open("episodes?run=first&agent=critic")
    critics = [entry for entry in read_index(runs / "first") if "critic" in (entry.agents or ())]
    assert page.texts("[data-total]")[0].endswith(f"of {len(critics)}")
    page.open("episodes?run=first&order=reward&text=WHAT%20is")
    assert page.texts("[data-total]")[0].endswith("of 18")
    # The episodes in full are the first seven of the list, and open with their group and a comparison.
    links = page.run(
        "return [...document.querySelectorAll('td a')].map((one) => one.getAttribute('href'))"
        ".filter((one) => one.startsWith('#/episode'))"
    )
    page.open(links[6].removeprefix("#/"))
    page.wait(lambda: page.all(".tokens .t"))
    page.element(".tools a[href*='group']").click()
    page.wait(lambda: page.all(".side article"))
    page.open(links[0].removeprefix("#/"))
    page.element(".tools a[href*='compare']").click()
    page.wait(lambda: page.all(".both"))
    page.open(links[7].removeprefix("#/"))
    assert "It has 7 of 18 episodes in full" in page.element(".error").text
    page.open(f"task?run=first&task={key_of('sum/0')}")
    page.wait(lambda: page.all("svg.strip"))
    assert page.complaints() == []


def test_all_episodes_of_a_hostile_run(page: Page, hostile: Path, tmp_path: Path) -> None:
    export(hostile / NAME, "--out", tmp_path / "snapshot", "--episodes", "all")
    page.driver.get(page.address)
    page.wait(lambda: page.all(".charts canvas"))
    assert_harmless(page)
    page.open(page.run("return 'episodes?' + new URLSearchParams({run: arguments[0]})", NAME))
    entries = read_index(hostile / NAME, lambda _: None)
    assert page.texts("[data-total]")[0].endswith(f"of {len(entries)}")
    page.element("td a[href^='#/episode']").click()
    page.wait(lambda: page.all(".tokens .t"))
    assert_harmless(page)


def test_a_folder_is_not_overwritten(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not overwritten"):
        export(runs / "first", "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_module_of_the_page_can_be_bundled() -> None:
    for module in sorted((STATIC / "js").glob("*.js")):
        script = bundle(f"js/{module.name}")
        assert f'"js/{module.name}": (exported) =>' in script
        assert not re.search(r"^(import|export) ", script.replace("/*", "\n/*"), re.MULTILINE)

"""Check the viewer's pages with axe-core: `python -m campaigns.viewer_accessibility axe.min.js launcher_record`.

Each kind of page is opened once, light and dark, at the widths of a desktop and of a phone. The check fails on serious
and critical violations, on pages that scroll sideways, and on elements that take the focus without showing it.
`npm install axe-core` provides `node_modules/axe-core/axe.min.js`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By

from astuner.viewer.runs import Runs
from tests.viewer.browser import Page, chromium
from tests.viewer.conftest import served

WIDTHS = (1280, 390)
SERIOUS = {"serious", "critical"}
AXE = """
const done = arguments[0];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations));
"""
FRAMES = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
LINKS = """
return [...document.querySelectorAll("a[href^='#/']")].map((link) => link.getAttribute("href").slice(2))
"""
FOCUSED = """
const at = document.activeElement, style = getComputedStyle(at);
const shown = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
const name = at === document.body ? "" : `${at.tagName.toLowerCase()}.${at.getAttribute("class")}`;
return [name && `${name} ${at.textContent.slice(0, 40)}`, shown];
"""
TAB = "\ue004"


def kind(place: str) -> str:
    """Return the kind of page at an address; a comparison of runs is a separate kind."""
    name, _, query = place.partition("?")
    return f"{name} of several" if query.count("run=") > 1 and name == "run" else name


def ready(page: Page) -> None:
    """Wait for the parts of the page that load later."""
    page.wait(lambda: not page.run("return /\\bloading\\b/.test(document.getElementById('main').innerText)"))
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.driver.execute_async_script(FRAMES)


def places(page: Page, start: list[str]) -> list[str]:
    """Return one address of each kind of page, found by following links from `start`."""
    found: dict[str, str] = {}
    waiting = list(start)
    while waiting:
        place = waiting.pop(0)
        if kind(place) in found:
            continue
        found[kind(place)] = place
        page.open(place)
        ready(page)
        waiting += [str(link) for link in page.run(LINKS)]
    return list(found.values())


def problems(page: Page, axe: str) -> Iterator[str]:
    """Yield the problems of the page that is open."""
    page.run(axe)
    violations: list[dict[str, Any]] = page.driver.execute_async_script(AXE)
    for violation in violations:
        if violation["impact"] in SERIOUS:
            targets = ", ".join(str(node["target"][0]) for node in violation["nodes"][:4])
            summary = violation["nodes"][0]["failureSummary"].replace("\n", " ")[:300]
            yield f"{violation['impact']}: {violation['id']} ({len(violation['nodes'])} elements: {targets}): {summary}"
    if not page.run("return document.documentElement.scrollWidth <= innerWidth"):
        yield "the page scrolls sideways"


def unseen_focus(page: Page, keys: int) -> Iterator[str]:
    """Yield the elements that the tab key reaches and that do not show the focus."""
    page.run("document.activeElement.blur(); scrollTo(0, 0)")
    for _ in range(keys):
        page.driver.switch_to.active_element.send_keys(TAB)
        element, shown = page.run(FOCUSED)
        if not element:
            return
        if not shown:
            yield f"the focus is not shown: {element}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("axe", type=Path, help="the file axe.min.js of the npm package axe-core")
    parser.add_argument("runs", type=Path, help="a folder of runs, such as launcher_record")
    arguments = parser.parse_args()
    axe = arguments.axe.read_text(encoding="utf-8")
    names = list(Runs(arguments.runs).all())
    start = ["runs", *(f"run?run={name}" for name in names), "run?" + "&".join(f"run={name}" for name in names[:2])]
    failures = 0
    with tempfile.TemporaryDirectory() as cache, served(arguments.runs, Path(cache)) as address:
        for dark in (False, True):
            with chromium(dark=dark) as driver:
                page = Page(driver, address)
                for width in WIDTHS:
                    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                    for place in places(page, start):
                        page.open(place)
                        ready(page)
                        found = list(problems(page, axe))
                        if not dark and width == WIDTHS[0]:
                            found += unseen_focus(page, 60)
                        failures += len(found)
                        theme = "dark" if dark else "light"
                        print(f"{'FAIL' if found else 'ok':4}  {width:4}  {theme:5}  {kind(place)}")
                        for problem in found:
                            print(f"      {problem}")
                        assert driver.find_elements(By.CSS_SELECTOR, "main > *")
    print(f"{failures} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""The lists of runs and episodes, failures, logs, and the notices about loading, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from astuner.run_record.recorded_run import RecordedRun, RunNote, write_note
from tests.viewer.browser import CHROMIUM, DRIVER, Page, leaving
from tests.viewer.conftest import served
from tests.viewer.records import Agents, an_episode, open_record, step_metrics, write_step

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver on the PATH: install them to run these"
)


@pytest.fixture(scope="module")
def folder(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: `good`, its old copy `good.1`, its debug run `good-debug`, and `broken`, whose episodes failed."""
    folder = tmp_path_factory.mktemp("launcher_record")
    for name in ("good.1", "good-debug", "good"):
        with open_record(folder / name) as record:
            write_step(record, agents, 1)
            record.log_metrics(2, step_metrics(2))
    failed: dict[str, Any] = {"status": "failed", "reward": None, "is_success": None, "error_kind": "workflow"}
    with open_record(folder / "broken") as record:
        for number in range(4):
            error = f"port {number} refused" if number else "no key"
            trace = f"Traceback\n  in connect\nOSError: {error}"
            episode = an_episode(f"b{number}", "t", number, (), error=error, error_traceback=trace, **failed)
            record.write_episode(1, "train", episode, None)
    (folder / "broken/run.log").write_text("".join(f"line {number} of the log\n" for number in range(10_000)))
    write_note(folder / "good", RunNote(text="to keep", tags=("baseline",)))
    return folder


@pytest.fixture(scope="module")
def page(browser: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(folder, tmp_path_factory.mktemp("cache")) as address, leaving(browser) as driver:
        yield Page(driver, address)


def names(page: Page) -> list[str]:
    return page.texts(".list .run-title > a")


def test_the_list_of_runs_hides_copies_and_shows_failures(page: Page):
    page.open("runs")
    assert sorted(names(page)) == ["broken", "good"]
    assert page.texts("tr.failing .run-title > a") == ["broken"]
    assert page.texts("tr.failing .badge") == ["all failed"]
    page.element("input[name=all]").click()
    assert sorted(names(page)) == ["broken", "good", "good-debug", "good.1"]
    assert "all=1" in page.driver.current_url
    page.element("input[name=q]").send_keys("keep BASE")
    assert names(page) == ["good"]
    page.open("runs?all=1&sort=run")
    assert names(page) == sorted(names(page))
    page.element("[name='sort reward']").click()
    assert names(page)[-1] == "broken", "a run without a reward is the last one"
    assert page.run("return document.activeElement.name") == "sort reward"


def test_columns_are_chosen_and_remembered(page: Page):
    page.open("runs")
    page.element(".chooser summary").click()
    page.wait(lambda: page.all("[name='column loss']"))
    page.element("[name='column loss']").click()
    page.wait(lambda: "loss" in page.texts(".list th button"))
    assert "loss" in page.driver.current_url
    page.open("runs")
    assert "loss" in page.texts(".list th button")
    page.open("runs?columns=step,entropy,grad_norm&q=good")
    assert page.texts(".list th button") == ["run", "step", "entropy", "grad_norm"]
    values = step_metrics(2)
    assert page.texts(".list td")[-2:] == [f"{values[name]:.3g}" for name in ("entropy", "grad_norm")]
    page.run("localStorage.clear()")


def test_notes_and_tags_are_edited(page: Page, folder: Path):
    page.open("runs?sort=run")
    page.element("button.edit").click()
    page.element("dialog textarea").send_keys("the port was in use")
    page.element("dialog input[name=tags]").send_keys("to repeat, ports")
    page.element("dialog button[type=submit]").click()
    page.wait(lambda: "the port was in use" in page.texts(".note-text"))
    assert RecordedRun(folder / "broken").note == RunNote(text="the port was in use", tags=("to repeat", "ports"))
    page.open("runs?tag=ports")
    assert names(page) == ["broken"]


def test_failures_lead_to_their_episodes_and_tracebacks(page: Page):
    page.open("run?run=broken")
    assert page.texts("#failures h2") == ["All 4 episodes failed"]
    assert page.texts("#failures .times") == ["3×", "1×"]
    page.element("#failures .times").click()
    page.wait(lambda: page.texts("[data-total]") == ["1–3 of 3"])
    assert "port 3 refused" in page.text()
    page.open("logs?run=broken&file=tracebacks")
    assert page.texts("section.traceback h2") == ["3× port 3 refused", "1× no key"]
    assert "in connect" in page.texts("section.traceback pre")[0]


def test_a_search_marks_the_matches_and_answers_unfold(page: Page):
    page.open("episodes?run=good")
    field = page.element("input[name=text]")
    field.send_keys("boxed", Keys.ENTER)
    page.wait(lambda: set(page.texts(".excerpt mark")) == {"boxed"})
    assert "text=boxed" in page.driver.current_url
    page.open("episodes?run=good&order=step")
    page.element(".answer button").click()
    page.wait(lambda: page.all(".answer .said"))
    assert page.texts(".answer .said")[0] in ("\\boxed{3}", "\\boxed{4}", "It looks right.")


def test_a_log_shows_its_end_and_follows_the_run(page: Page, folder: Path):
    page.open("logs?run=broken")
    assert page.texts(".log")[0].rstrip().endswith("line 9999 of the log")
    first = page.texts(".log")[0][:20]
    page.element("#earlier").click()
    page.wait(lambda: page.texts(".log")[0][:20] != first)
    with (folder / "broken/run.log").open("a") as log:
        log.write("a new line\n")
    page.wait(lambda: page.texts(".log")[0].rstrip().endswith("a new line"))
    page.element("input[name=text]").send_keys("LINE 77 of", Keys.ENTER)
    page.wait(lambda: page.texts(".matches mark") == ["line 77 of"])


def test_narrow_screens_have_no_sideways_tables(page: Page):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for place in ("runs?all=1", "episodes?run=good", "run?run=broken", "step?run=good&step=1", "logs?run=broken"):
            page.open(place)
            wide = "return [document.documentElement, ...document.querySelectorAll('.scroll')]"
            assert page.run(f"{wide}.every((box) => box.scrollWidth <= Math.max(box.clientWidth, 0) + 1)"), place
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_page_says_that_it_loads_and_that_the_viewer_does_not_answer(page: Page):
    assert page.complaints() == []
    page.open("runs")
    hold = "window.real = window.fetch; window.fetch = () => new Promise((done) => { window.release = done; })"
    page.run(f"{hold}; location.hash = '#/episodes?run=good'")
    page.wait(lambda: page.texts("main > .loading") == ["Loading …"])
    assert page.all("main[aria-busy=true]")
    page.run("window.fetch = () => Promise.reject(new TypeError('failed')); location.hash = '#/run?run=good'")
    page.wait(lambda: page.all("main > .error[role=alert]"))
    assert "The viewer does not answer" in page.text()
    page.run("window.fetch = window.real")
    page.element("main > .error button").click()
    page.wait(lambda: page.texts("h1") and "good" in page.texts("h1")[0])
    page.run("window.fetch = () => Promise.reject(new TypeError('failed'))")
    page.wait(lambda: "The viewer does not answer" in page.texts("#live.bad")[0] if page.all("#live.bad") else False)
    page.run("window.fetch = window.real")
    page.wait(lambda: not page.all("#live.bad"))

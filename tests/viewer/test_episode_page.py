"""The pages of an episode, a comparison and a task in a real browser, compared with the record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from astuner.run_record import by_token, entropy_by_token, read_index, read_recorded_episode
from astuner.viewer.index import key_of
from tests.viewer.browser import CHROMIUM, DRIVER, Page, leaving
from tests.viewer.conftest import served

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver on the PATH: install them to run these"
)
PLAIN = "train-000002-sum/0-0"
FORKED = "train-000002-sum/0-1"


@pytest.fixture(scope="module")
def page(browser: Any, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(runs, tmp_path_factory.mktemp("cache")) as address, leaving(browser) as driver:
        yield Page(driver, address)


@pytest.fixture(autouse=True)
def nothing_is_complained_of(page: Page) -> Iterator[None]:
    page.complaints()
    yield
    assert page.complaints() == []


def press(page: Page, *keys: str) -> None:
    ActionChains(page.driver).send_keys(*keys).perform()


def has_focus(page: Page, selector: str) -> bool:
    return bool(page.run("return document.activeElement.matches(arguments[0])", selector))


def test_the_text_is_above_the_fold(page: Page):
    page.open(f"episode?run=first&episode={key_of(FORKED)}")
    bottom = page.run("return document.querySelector('.chat .message').getBoundingClientRect().bottom")
    assert bottom < page.run("return innerHeight")
    assert page.texts(".outcome h2") == ["Expected · answer", "Answer · last message", "Judgement"]
    expected, answer, judgement = (text.strip() for text in page.texts(".outcome .cut"))
    assert (expected, answer) == ("3", "It looks right.")
    assert judgement.startswith("reward 0 · no success")
    assert page.texts(".chat .agent") == ["solver", "solver"]
    assert page.texts(".timeline-choice button") == ["1 solver", "2 critic", "3 solver"]
    page.all(".timeline-choice button")[1].click()
    page.wait(lambda: page.texts(".chat .agent") == ["critic"])
    assert "timeline=2" in page.driver.current_url


def test_an_error_comes_first(page: Page, runs: Path):
    failed = next(entry for entry in read_index(runs / "first") if entry.error_kind == "workflow")
    page.open(f"episode?run=first&episode={key_of(failed.episode_id)}")
    assert page.element(".error").text == "ValueError: the tool was not there"
    assert page.run("return document.querySelector('.error').getBoundingClientRect().bottom"
                    " < document.querySelector('.outcome').getBoundingClientRect().top")  # fmt: skip
    assert not page.run("return document.querySelector('details.traceback').open")


def bin_of(value: float, bounds: list[float]) -> int:
    return sum(value >= bound for bound in bounds)


def test_tokens_are_coloured_by_recorded_values(page: Page, runs: Path):
    entry = next(entry for entry in read_index(runs / "first") if entry.episode_id == PLAIN)
    recorded = read_recorded_episode(runs / "first" / entry.path)
    (sample,), (update,) = recorded.episode.samples, recorded.updates
    entropies = entropy_by_token(sample, update)
    expected = {
        at: f"s{bin_of(round(value, 4), [0.1, 0.5, 1, 2, 4])}"
        for at, value in enumerate(entropies)
        if value is not None
    }
    page.open(f"episode?run=first&episode={key_of(PLAIN)}&token={max(expected)}&colour=entropy")
    page.wait(lambda: page.all(f"[data-at='{max(expected)}']"))
    shown = page.run("return [...document.querySelectorAll('.tokens .t')].map((t) => [t.dataset.at, t.classList[1]])")
    assert shown
    assert {int(at): kind for at, kind in shown} == {int(at): expected.get(int(at), "cn") for at, _ in shown}
    counts = Counter(expected.values())
    legend = page.texts(".legend[data-colour=entropy] span")
    assert [int(text.rpartition(": ")[2]) for text in legend[:-1]] == [counts[f"s{number}"] for number in range(6)]
    assert int(legend[-1].rpartition(": ")[2]) == len(sample.token_ids) - len(expected)
    Select(page.element("select[name=colour]")).select_by_value("ratio")
    assert "colour=ratio" in page.driver.current_url
    _, current = by_token(sample, update)
    ratios = [math.exp(new - old) for new, old in zip(current, sample.logprobs, strict=True) if new is not None]
    assert {bin_of(ratio, [0.5, 0.8, 0.95, 1.05, 1.25, 2]) for ratio in ratios} == {1}
    page.wait(lambda: page.all(f".t.d1[data-at='{max(expected)}']"))
    assert page.texts(".legend span")[1] == f"0.5 – 0.8: {len(expected)}"
    Select(page.element("select[name=colour]")).select_by_value("kind")
    assert "colour=" not in page.driver.current_url


def test_two_episodes_of_a_group_are_compared(page: Page):
    page.open(f"group?run=first&step=2&split=train&task={key_of('sum/0')}")
    button = page.element(".bar button")
    assert not button.is_enabled()
    names = page.texts(".side h2 a")
    page.all(".side input[type=checkbox]")[names.index(FORKED)].click()
    page.all(".side input[type=checkbox]")[names.index(PLAIN)].click()
    button.click()
    page.wait(lambda: page.all(".aligned .pair"))
    assert page.texts(".both h2 a") == [FORKED, PLAIN]
    assert page.texts("del.removed")[:2] == ["4", "4"]
    assert page.texts("ins.added") == ["3", "3"]
    assert [text.split(" · ")[0] for text in page.texts(".both b")] == ["reward 0", "reward 1"]
    page.element("[data-side=after] select").send_keys("second")
    # The buttons of the other run replace those of this run, one of which is pressed.
    page.wait(
        lambda: page.texts("[data-side=after] button") and not page.texts("[data-side=after] [aria-pressed=true]")
    )
    page.all("[data-side=after] button")[0].click()
    page.wait(lambda: page.run("return document.querySelector('[data-side=after] select').value") == "second")
    page.wait(lambda: "with_run=second" in page.driver.current_url and page.all(".both h2 a"))
    page.driver.find_element("link text", "swap sides").click()
    page.wait(lambda: page.texts(".both h2 a")[-1:] == [FORKED])


def test_a_task_over_the_steps(page: Page, runs: Path):
    page.open(f"task?run=first&task={key_of('sum/0')}")
    entries = [entry for entry in read_index(runs / "first") if entry.task_id == "sum/0"]
    assert len(page.all(".strip circle")) == len({entry.step for entry in entries})
    assert page.texts("[data-total]") == [f"{len(entries)} episodes"]
    answers = page.texts("main table.list td:nth-child(3)")
    assert answers == [entry.answer for entry in entries]
    page.driver.find_element("link text", "the worst episode with the best").click()
    page.wait(lambda: page.all(".aligned .pair"))
    assert [text.split(" · ")[0] for text in page.texts(".both b")] == ["reward 0", "reward 1"]


def test_keys(page: Page):
    page.open("episodes?run=first&step=2&order=step")
    names = page.texts("main table.list tbody td:first-child a")
    press(page, "/")
    assert has_focus(page, "input[type=search]")
    press(page, "?j")
    assert not page.run("return document.querySelector('dialog.keys').open")
    press(page, Keys.BACKSPACE, Keys.BACKSPACE)
    page.run("document.activeElement.blur()")
    press(page, "j")
    press(page, "j")
    assert page.run("return document.activeElement.textContent") == names[1]
    press(page, Keys.ENTER)
    page.wait(lambda: page.texts("h1") == [names[1]])
    press(page, "j")
    press(page, "j")
    press(page, "k")
    assert page.run("return [...document.querySelectorAll('.message')].indexOf(document.activeElement)") == 0
    press(page, Keys.ARROW_RIGHT)
    assert "token=0" in page.driver.current_url
    press(page, "J")
    page.wait(lambda: page.texts("h1") == [names[2]])
    press(page, "?")
    assert page.run("return document.querySelector('dialog.keys').open")
    assert page.run("return document.querySelector('dialog.keys').contains(document.activeElement)")
    press(page, Keys.ESCAPE)
    assert not page.run("return document.querySelector('dialog.keys').open")

"""The pages in a real browser, compared with the record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import Select

from astuner.run_record import read_index, read_metrics, read_recorded_episode
from astuner.run_record.summary import RunSummary
from astuner.run_record.updates import call_advantages
from astuner.viewer.index import key_of
from tests.viewer.browser import CHROMIUM, DRIVER, Page, leaving, looking
from tests.viewer.conftest import served
from tests.viewer.records import Agents, open_record, write_step

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver on the PATH: install them to run these"
)
FORKED = "train-000002-sum/0-1"


@pytest.fixture(scope="module")
def page(browser: Any, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(runs, tmp_path_factory.mktemp("cache")) as address, leaving(browser) as driver:
        yield Page(driver, address)


@contextmanager
def another(page: Page, folder: Path) -> Iterator[Page]:
    """Serve the runs of another folder. The page is left before the server ends, as it polls the server."""
    with served(folder, folder) as address:
        yield Page(page.driver, address)
        page.driver.get("about:blank")


@pytest.fixture(autouse=True)
def nothing_is_complained_of(page: Page) -> Iterator[None]:
    page.complaints()
    yield
    assert page.complaints() == []


def test_runs_can_be_selected_and_compared(page: Page):
    page.open("runs")
    boxes = page.all(".list input[type=checkbox]")
    assert len(boxes) == 2
    for box in boxes:
        box.click()
    page.element("#compare").click()
    page.wait(lambda: page.all("#differs"))
    assert set(page.texts("#differs td")) == {"astuner.trainer_common.optim.lr", "0.000001", "0.000003"}
    assert sorted(page.texts(".runs button")) == ["first", "second"]
    assert {"first", "second"} == set(page.texts(".chart .label"))


def test_a_run_shows_its_metrics(page: Page, runs: Path):
    page.open("run?run=first")
    page.wait(lambda: page.all(".charts canvas"))
    last = [row for row in read_metrics(runs / "first") if "reward/mean" in row.metrics][-1]
    assert page.texts(".tile b")[:2] == [str(last.step), f"{last.metrics['reward/mean']:.3g}"]
    rates = [row.metrics["val/success_rate"] for row in read_metrics(runs / "first")]
    assert page.texts(".tile b")[3] == f"{100 * rates[0]:.1f} % → {100 * rates[-1]:.1f} %"
    titles = page.texts(".chart h3")
    for title in (
        "Reward",
        "Success",
        "Loss",
        "KL of an update",
        "KL between sampler and policy",
        "Entropy",
        "Clip fraction",
        "Lengths in tokens",
        "Tokens",
        "Seconds by phase",
    ):
        assert title in titles
    assert len([text for text in page.texts("main table.list a") if text.startswith("train ")]) == 3


def test_the_pointer_reads_values_of_a_chart(page: Page):
    page.open("run?run=first")
    over = page.element(".u-over")
    ActionChains(page.driver).move_to_element(over).perform()
    assert page.wait(lambda: page.texts(".chart-legend .value")[:1] not in ([], ["last"]))


def test_from_step_to_group_to_episode(page: Page, runs: Path):
    page.open("step?run=first&step=2&split=train")
    page.element("a[title='sum/0']").click()
    page.wait(lambda: page.all(".side article"))
    assert page.texts("h1") == ["What is 1 + 2?"]
    assert "task sum/0" in page.text()
    rewards = [entry.reward for entry in read_index(runs / "first") if entry.step == 2 and entry.task_id == "sum/0"]
    shown = page.texts(".side article b")
    assert shown == [f"reward {reward:.0f}" for reward in sorted(rewards, reverse=True)]
    page.driver.find_element("link text", FORKED).click()
    page.wait(lambda: page.all(".tokens .t"))
    assert page.texts("h1") == [FORKED]


def test_filters_narrow_the_list_and_stay_in_the_address(page: Page, runs: Path):
    page.open("episodes?run=first")
    assert page.texts("[data-total]")[0].endswith("of 18")
    Select(page.element("select[name=fork]")).select_by_value("tools_changed")
    expected = sum("tools_changed" in (entry.forks or {}) for entry in read_index(runs / "first"))
    page.wait(lambda: page.texts("[data-total]")[0].endswith(f"of {expected}"))
    assert "fork=tools_changed" in page.driver.current_url
    page.open("episodes?run=first&error=workflow&step=2")
    assert page.texts("[data-total]")[0].endswith("of 1")
    page.open("episodes?run=first&text=what%20is%201")
    assert page.texts("[data-total]")[0].endswith("of 18")
    page.open("episodes?run=first&text=nothing-has-this")
    assert page.texts("[data-total]")[0] == "no episodes"


def test_a_failed_episode_shows_its_traceback_and_what_it_left(page: Page, runs: Path):
    failed = next(entry for entry in read_index(runs / "first") if entry.error_kind == "workflow")
    page.open(f"episode?run=first&episode={key_of(failed.episode_id)}")
    page.element("details.traceback summary").click()
    assert "in execute" in page.element("details.traceback pre").text
    changed, left = page.texts(".card.note")
    assert changed == "It changed settings of the process, which were restored: recursion limit: 60"
    assert left == "It left processes running, which astuner ended: sleep 600 (71)"


def test_the_judgement_of_an_episode(page: Page, runs: Path):
    judged = next(entry for entry in read_index(runs / "first") if entry.reward == 0)
    page.open(f"episode?run=first&episode={key_of(judged.episode_id)}")
    text = page.element("section.judgement").text
    assert all(part in text for part in ("Judgement", "the answer is wrong", "correct", "brief", "0.25"))


def test_details_of_a_token(page: Page, runs: Path, tokenizer: Any):
    entry = next(entry for entry in read_index(runs / "first") if entry.episode_id == FORKED)
    recorded = read_recorded_episode(runs / "first" / entry.path)
    call = recorded.episode.calls[0]
    at = len(call.prompt_ids)
    page.open(f"episode?run=first&episode={key_of(FORKED)}")
    element = page.element(f"[data-at='{at}']")
    assert "k2" in element.get_attribute("class")
    ActionChains(page.driver).move_to_element(element).perform()
    page.wait(lambda: page.all(".tip:not([hidden])"))
    text = dict(zip(page.texts(".tip dt"), page.texts(".tip dd"), strict=True))
    assert text["id"] == str(call.completion_ids[0])
    assert text["text"] == tokenizer.decode([call.completion_ids[0]])
    assert text["kind"] == "generated, trained"
    assert text["mask"] == "1"
    assert text["logprob, call 1"].startswith("-0.05 ")
    assert text["current logprob"].startswith("-0.3 ")
    assert text["current logprob"].endswith("-0.25")
    assert text["advantage"] == f"{recorded.labels.advantage}"
    assert text["policy version"] == "3"


def test_each_calls_own_advantage_is_shown(page: Page, runs: Path):
    """On the pages of the group and of the episode, by agent, by timeline and by token."""
    entry = next(e for e in read_index(runs / "first") if (e.step, e.task_id, e.repeat_index) == (2, "sum/0", 2))
    recorded = read_recorded_episode(runs / "first" / entry.path)
    by_call = call_advantages(recorded.episode.samples, recorded.updates)
    calls = recorded.episode.calls
    second = next(call for call in calls if by_call.get(call.call_id) not in (None, entry.advantage))
    assert len(set(by_call.values())) > 1
    between = f"{round(min(by_call.values()), 3):g} … {round(max(by_call.values()), 3):g}"
    page.open("step?run=first&step=2&split=train")
    page.element("a[title='sum/0']").click()
    page.wait(lambda: page.all(".side article"))
    assert any(f"solver {between}" in text for text in page.texts(".side article p"))
    page.open(f"episode?run=first&episode={key_of(entry.episode_id)}&timeline=1")
    assert between in page.text()
    place = next(n for n, head in enumerate(page.texts(".list:has(th:nth-child(10)) th")) if head == "advantage")
    cells = page.texts(f".list:has(th:nth-child(10)) td:nth-child({place + 1})")
    assert cells == [f"{round(by_call[c.call_id], 3):g}" if c.call_id in by_call else "–" for c in calls]
    ActionChains(page.driver).move_to_element(page.element(f"[data-at='{len(second.prompt_ids)}']")).perform()
    page.wait(lambda: page.all(".tip:not([hidden])"))
    text = dict(zip(page.texts(".tip dt"), page.texts(".tip dd"), strict=True))
    assert text["advantage"] == f"{round(by_call[second.call_id], 4):g}"


def test_the_tree_opens_timelines_and_names_causes(page: Page):
    page.open(f"episode?run=first&episode={key_of(FORKED)}")
    assert page.texts(".tree .cause") == ["tools_changed"]
    assert len(page.texts(".tree text:not(.cause)")) == 3
    page.run("document.querySelectorAll('.tree .seg')[arguments[0]].focus()", 0)
    critic = page.run(
        "const all = [...document.querySelectorAll('.tree .seg')];"
        "const has = (seg, run) => seg.querySelector(run) !== null;"
        "const one = all.find((seg) => has(seg, '.said-run.not') && !has(seg, '.said-run:not(.not)'));"
        "one.dispatchEvent(new MouseEvent('click')); return one.getAttribute('aria-label')"
    )
    number = critic.partition(":")[0].removeprefix("timeline ")
    page.wait(lambda: f"timeline={number}" in page.driver.current_url)
    assert "It looks right." in page.text()
    assert page.all(".tokens .k3")
    assert not page.all(".tokens .k2")


def test_a_link_selects_a_token(page: Page):
    page.open(f"episode?run=first&episode={key_of(FORKED)}&timeline=2&token=40")
    assert page.element(".t.at").get_attribute("data-at") == "40"
    assert {"Messages of timeline 2", "Tokens of timeline 2"} < set(page.texts("h2"))
    page.element(".tokens").send_keys("\ue014")  # the right arrow
    assert "token=41" in page.driver.current_url


def test_a_running_run_is_refreshed(page: Page, agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "live") as record:
        write_step(record, agents, 1)
        with another(page, tmp_path) as live:
            live.open("run?run=live")
            assert live.texts(".tile b")[0] == "1"
            write_step(record, agents, 2)
            live.wait(lambda: live.texts(".tile b")[0] == "2")
            live.wait(lambda: "train 2" in live.texts("main table.list a"))
            live.open("episodes?run=live")
            write_step(record, agents, 3)
            live.wait(lambda: live.texts("[data-total]")[0].endswith("of 18"))


def test_a_run_that_is_restarted_and_ends_while_it_is_shown(page: Page, agents: Agents, tmp_path: Path):
    def last_step_on_the_chart() -> str:
        ActionChains(page.driver).move_to_element_with_offset(page.element(".u-over"), 100, 0).perform()
        ActionChains(page.driver).move_by_offset(5, 5).perform()
        return page.texts(".chart-legend .value")[0]

    with another(page, tmp_path) as live:
        with open_record(tmp_path / "live") as record:
            for step in range(1, 6):
                write_step(record, agents, step)
            live.open("run?run=live")
            assert live.texts(".pill") == ["running"]
            over = live.element(".u-over")
            drag = ActionChains(page.driver).move_to_element_with_offset(over, -60, 0).click_and_hold()
            drag.move_by_offset(60, 0).release().perform()
            zoomed = last_step_on_the_chart()
            assert zoomed in ("2", "3")
            record.log_metrics(6, {"reward/mean": 0.9})
            live.wait(lambda: live.texts(".tile b")[0] == "6")
            assert last_step_on_the_chart() == zoomed
            assert "val/loss" not in "".join(live.texts(".chart-legend .label"))
            record.log_metrics(7, {"val/loss": 0.5})
            live.wait(lambda: "val/loss" in live.texts(".chart-legend .label"))
            live.open("runs")
            live.element(".list input[type=checkbox]").send_keys(" ")
            write_step(record, agents, 8)
            live.wait(lambda: "8" in live.texts("td"))
            assert page.run("return document.activeElement.name") == "live"
            assert page.run("return document.activeElement.checked")
            live.open("run?run=live")
            record.write_summary(RunSummary(backbone="local", seed=1, steps=8, seconds=2.0))
        live.wait(lambda: live.texts(".pill") == ["finished"])


def test_without_a_tokenizer_ids_are_shown(page: Page, agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 2)
    with served(tmp_path, tmp_path) as address:
        other = Page(page.driver, address)
        other.open(f"episode?run=run&episode={key_of(FORKED)}")
        first = read_recorded_episode(next((tmp_path / "run").glob("episodes/**/sum_0-1-*.json"))).episode.calls[0]
        assert other.element(".t").text.strip() == str(first.prompt_ids[0])
        assert "tokenizer is not on this machine" in other.text()


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_follow_the_system_and_the_button(browser: Any, runs: Path, tmp_path: Path, dark: bool):
    with served(runs, tmp_path) as address, leaving(browser), looking(browser, 420, 800, dark):
        page = Page(browser, address)
        for place in ("runs", "run?run=first", "episodes?run=first", f"episode?run=first&episode={key_of(FORKED)}"):
            page.open(place)
            assert page.run("return document.documentElement.scrollWidth <= innerWidth"), place
        assert page.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        page.element("#theme").click()
        assert page.run("return document.documentElement.dataset.theme") == ("light" if dark else "dark")

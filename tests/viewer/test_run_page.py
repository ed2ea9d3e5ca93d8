"""The page of a run and of several runs: charts, tasks by step, results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.run_record import read_index, read_metrics
from astuner.run_record.metrics import success_interval
from astuner.run_record.recorded_run import RecordedRun
from astuner.run_record.summary import RunSummary, ValidationsSummary, ValidationSummary
from astuner.run_record.verdict import run_verdict
from astuner.viewer.index import key_of
from tests.viewer.browser import Page, leaving
from tests.viewer.conftest import Ask, client, served
from tests.viewer.records import open_record

REWARDS = (0.0, 0.25, 0.5, 1.0)


def index_row(step: int, task: int, repeat: int, split: str = "train") -> dict[str, object]:
    reward = REWARDS[(step + task + repeat) % 4] if (step, repeat) != (2, 0) else None
    return {
        "step": step, "split": split, "task_id": f"t{task}", "episode_id": f"{split}-{step}-{task}-{repeat}",
        "repeat_index": repeat, "status": "failed" if reward is None else "ok", "reward": reward,
        "is_success": None if reward is None else reward == 1, "advantage": None, "calls": 1, "samples": 1,
        "dropped_samples": 0, "tokens_raw": 9, "tokens_distinct": 9, "tokens_trained": 3, "seconds": 1.0,
        "error_kind": None if reward is not None else "workflow",
        "path": f"episodes/{split}/{step}-{task}-{repeat}.json",
    }  # fmt: skip


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, `good` and `bad`, with five steps, of which one is missing, and two validations."""
    folder = tmp_path_factory.mktemp("learning")
    for name, after in (("good", 0.75), ("bad", 0.25)):
        with open_record(folder / name) as record:
            rows = [index_row(step, task, repeat) for step in (1, 2, 3, 5) for task in range(60) for repeat in range(4)]
            rows += [index_row(0, task, 0, "val") for task in range(60)]
            index = folder / name / "episodes/index.jsonl"
            index.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for step in (0, 1, 2, 3, 5):
                values = {"reward/mean": 0.1 * step, "kl/update": 0.001 * step, "loss/kl": 0.0, "episodes/total": 240.0}
                values["update/groups_without_variance"] = 0.25
                validation = {"val/success_rate": after, "val/episodes": 200.0, "val/reward": after}
                record.log_metrics(step, (values if step else {}) | (validation if step in (0, 5) else {}))
            rates = [ValidationSummary(success_rate=rate, reward=rate, episodes=200) for rate in (0.25, after)]
            validations = ValidationsSummary(before=rates[0], after=rates[1])
            summary = RunSummary(backbone="local", seed=1, steps=5, seconds=75.0, validation=validations)
            record.write_summary(summary)
    return folder


@pytest.fixture(scope="module")
def asked(learning: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with client(learning, tmp_path_factory.mktemp("cache")) as session:
        yield lambda path, **params: session.get(f"/api/{path}", params=params).json()


def test_the_distribution_of_the_rewards_of_a_step(asked: Ask, learning: Path) -> None:
    answer = asked("charts", run="good")["rewards"]
    assert (answer["low"], answer["high"], answer["bins"]) == (0.0, 1.0, 20)
    for row in answer["steps"]:
        rewards = sorted(
            entry.reward
            for entry in read_index(learning / "good")
            if (entry.step, entry.split) == (row["step"], "train") and entry.reward is not None
        )
        assert row["episodes"] == len(rewards) == sum(number for _, number in row["histogram"])
        assert row["mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert (row["least"], row["most"]) == (rewards[0], rewards[-1])
        exact = [rewards[max(0, -int(-share * len(rewards) // 1) - 1)] for share in (0.1, 0.5, 0.9)]
        assert [row["q10"], row["median"], row["q90"]] == exact
        assert dict(row["histogram"]) == {
            min(int(20 * reward), 19): rewards.count(reward) for reward in REWARDS if reward in rewards
        }
    assert [row["step"] for row in answer["steps"]] == [1, 2, 3, 5]


def test_validations_have_intervals(asked: Ask) -> None:
    first, last = asked("charts", run="good")["validations"]
    # The episodes of the first one are recorded, those of the last one are not.
    assert (first["step"], first["episodes"], first["success"]) == (0, 60, 0.25)
    assert first["success_interval"] == pytest.approx(success_interval(0.25, 60))
    low, high = first["reward_interval"]
    assert (low + high) / 2 == pytest.approx(first["reward"]) == pytest.approx(sum(REWARDS) / 4)
    assert (last["step"], last["episodes"], last["success"], last["reward"]) == (5, 200, 0.75, 0.75)
    assert last["success_interval"] == pytest.approx(success_interval(0.75, 200))
    assert last["reward_interval"] is None


def test_results_by_task_add_up(asked: Ask, learning: Path) -> None:
    answer = asked("solve_rates", run="good")
    entries = [entry for entry in read_index(learning / "good") if entry.split == "train"]
    assert answer["steps"] == [1, 2, 3, 5]
    assert [task["task"] for task in answer["tasks"]] == [f"t{number}" for number in range(60)]
    assert answer["tasks"][7]["key"] == key_of("t7")
    cells = {(task, step): rest for task, step, *rest in answer["cells"]}
    group = [entry for entry in entries if (entry.step, entry.task_id) == (2, "t7")]
    judged = [entry for entry in group if entry.is_success is not None]
    expected = [len(group), len(judged), sum(bool(entry.is_success) for entry in judged)]
    assert cells[7, 1] == [*expected, len(judged), sum(entry.reward or 0.0 for entry in judged)]
    assert len(cells) == 4 * 60
    assert asked("solve_rates", run="good", split="val")["steps"] == [0]


def test_results_are_those_of_the_terminal(asked: Ask, learning: Path) -> None:
    answer = asked("results", run=["good", "bad"])
    good, bad = answer["rows"]
    assert (good["outcome"], bad["outcome"]) == ("learned", "unclear")
    facts = RecordedRun(learning / "good")
    assert tuple(good["verdict"]) == run_verdict(facts.summary, read_metrics(facts.folder)).lines
    assert good["interval"] == pytest.approx(success_interval(0.75, 200))
    assert (good["success_before"], good["success"], good["kl_start"], good["kl_update"]) == (0.25, 0.75, 0.0, 0.005)
    assert bad["suggestions"]
    assert answer["differences"][0].startswith("bad and good differ beyond noise: -50.0 points")


@pytest.fixture(scope="module")
def page(browser: Any, learning: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(learning, tmp_path_factory.mktemp("cache")) as address, leaving(browser) as driver:
        yield Page(driver, address)


def chart(page: Page, title: str) -> Any:
    return page.element(f"section.chart[aria-label='{title}']")


def test_the_first_lines_say_whether_the_run_learned(page: Page) -> None:
    page.open("run?run=good")
    assert page.element("#verdict strong").text.startswith("it learned: success 25.0% ± ")
    page.open("run?run=bad")
    assert page.element("#verdict strong").text.startswith("no clear change: ")
    assert page.all("#verdict li")
    assert page.complaints() == []


def test_zeros_gaps_and_logarithmic_axes(page: Page) -> None:
    page.open("run?run=good")
    zeros = chart(page, "KL to the starting model")
    page.wait(lambda: "all values are 0" in zeros.text)
    assert not zeros.find_element("css selector", ".chart-head button").is_enabled()
    update = chart(page, "KL of an update")
    update.find_element("css selector", ".chart-head button").click()
    assert "log=KL+of+an+update" in page.driver.current_url
    page.wait(lambda: chart(page, "KL of an update").find_element("css selector", "[aria-pressed=true]"))
    over = "section.chart[aria-label='KL of an update'] .u-over"
    page.wait(lambda: page.all(over))
    # The places of the x axis are 1, 2, 3, the gap at 4, and 5.
    for _ in range(4):
        page.element(over).send_keys("\ue014")  # the right arrow
    value = page.texts("section.chart[aria-label='KL of an update'] .value")
    assert value == ["4", "–"]
    page.element(over).send_keys("\ue014")
    assert page.texts("section.chart[aria-label='KL of an update'] .value") == ["5", "0.005"]


def test_tasks_by_step(page: Page) -> None:
    page.open("run?run=good&tasks_order=name")
    page.wait(lambda: page.all(".heat td"))
    assert len(page.all(".heat tbody tr")) == 40
    rates = page.texts(".heat tbody tr:first-child td")
    assert rates == ["25", "33", "25", "25"]
    link = page.element(".heat tbody a").get_attribute("href")
    assert link.endswith(f"#/task?run=good&task={key_of('t0')}")
    page.run("[...document.querySelectorAll('#tasks button')].at(-1).click()")
    page.wait(lambda: len(page.all(".heat tbody tr")) == 20)
    assert "tasks_from=40" in page.driver.current_url


def test_runs_are_compared_by_a_table_and_one_legend(page: Page) -> None:
    page.open("run?run=good&run=bad")
    text = page.element("#results").text
    assert all(part in text for part in ("75.0 %", "68.6 to 80.5", "learned", "no clear change", "differ beyond noise"))
    assert len(page.all(".runs")) == 1
    assert page.texts(".chart h3").count("Reward") == 1
    page.element(".runs button").click()
    page.wait(lambda: page.all(".runs button[aria-pressed=false]"))
    assert page.complaints() == []

"""The page of a rescored run, and the page of an episode with degenerate output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.analysis.rescore.command import RescoreOptions, rescore
from astuner.run_record import find_rescores, read_rescored_episodes
from astuner.schema import Anomaly
from astuner.viewer.index import key_of
from tests.analysis.rescore.records import an_episode, contents, write_run
from tests.viewer.browser import CHROMIUM, DRIVER, Page, leaving, looking
from tests.viewer.conftest import client, served

JUDGE = """
from astuner.errors import UnscoredError
from astuner.task_judge.judge_base import BaseJudge


class Exact(BaseJudge):
    def compute_reward(self, task, output):
        if output.metadata["final_answer"] == "unclear":
            raise UnscoredError("the answer is unclear <b>", "unclear")
        return float(output.metadata["final_answer"] == task.metadata["answer"]), True
"""
ANOMALY = Anomaly("repetition", "repeats itself (41 times 'la <b>')", "3-7-3/1", 2, "critic")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose recorded reward is the length of the answers, judged by their correctness."""
    parent = tmp_path_factory.mktemp("rescored")
    steps = {}
    for step in (1, 2, 3):
        answers = ["7" + "x" * (step + 1) if repeat < step else "7" for repeat in range(3)]
        steps[step] = [
            an_episode(step, "7", repeat, answer, float(len(answer)))
            for repeat, answer in enumerate([*answers, "unclear"])
        ]
    steps[3][3] = replace(steps[3][3], anomaly=ANOMALY)
    run = write_run(parent / "hacked", steps)
    (parent / "page_judge.py").write_text(JUDGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(parent)
        rescore(str(run), parent, RescoreOptions(("page_judge->Exact",), audit=True))
    return parent


def test_the_page_of_a_run_lists_its_results(folder: Path, tmp_path: Path):
    (name,) = find_rescores(folder / "hacked")
    before = contents(folder)
    with client(folder, tmp_path) as session:
        (row,) = session.get("/api/rescores", params={"run": "hacked"}).json()
        assert (row["name"], row["judge"], row["episodes"]) == (name, "page_judge->Exact", 11)
        content = session.get("/api/rescore", params={"run": "hacked", "name": name}).json()
        rows = [row for row in read_rescored_episodes(folder / name) if row.is_changed]
        assert content["changed_total"] == len(rows)
        assert {row["key"] for row in content["changed_episodes"]} == {key_of(row.episode_id) for row in rows}
        flips = [row["flips_sign"] for row in content["changed_episodes"]]
        assert flips == sorted(flips, reverse=True)
        assert content["audit"]["diverges"] is True
        answer = session.get("/api/rescore", params={"run": "hacked", "name": "../hacked"})
        assert answer.status_code == 404
        assert "no result of astuner rescore named '../hacked'" in answer.json()["error"]
    assert contents(folder) == before


def test_a_damaged_result_is_left_out(folder: Path, tmp_path: Path):
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"format": 1}'), ("d", '{"format": 2}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rescore.json").write_text(text)
    assert find_rescores(tmp_path / "run") == {}


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no chromium with chromedriver on the PATH")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_pages_in_a_browser(browser: Any, folder: Path, tmp_path: Path, width: int, dark: bool):
    with served(folder, tmp_path) as address, leaving(browser), looking(browser, width, 900, dark):
        page = Page(browser, address)
        page.open("run?run=hacked")
        assert _fits(page)
        page.element("#rescores a").click()
        page.wait(lambda: "Judged by page_judge->Exact" in page.text())
        assert _fits(page)
        assert page.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert "The reward of recorded diverges from that of page_judge->Exact" in page.text()
        assert "the answer is unclear <b>" in page.text()
        assert page.texts("#changed tbody tr td:nth-child(2)")
        page.element("#audit table a").click()
        page.wait(lambda: "Messages of timeline 1" in page.text())
        page.open(f"episode?run=hacked&episode={key_of('3-7-3')}")
        assert "call 2 of agent critic: repetition: repeats itself (41 times 'la <b>')" in page.text()
        assert "2 degenerate" in page.texts("td")
        assert page.complaints() == []


def _fits(page: Page) -> Any:
    return page.run("return document.documentElement.scrollWidth <= innerWidth")

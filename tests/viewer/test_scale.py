"""Correctness for long runs and long episodes; bench/bench_view.py measures the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astuner.viewer.index import key_of
from tests.viewer.browser import Page, leaving
from tests.viewer.conftest import client, served
from tests.viewer.long_runs import index_row, many_episodes, many_tokens


def test_twenty_thousand_episodes_are_listed_and_filtered(tmp_path: Path):
    many_episodes(tmp_path / "long", 20_000)
    rows = [index_row(number) for number in range(20_000)]
    with client(tmp_path, tmp_path) as session:

        def ask(**params: object) -> tuple[int, list[str]]:
            answer = session.get("/api/episodes", params={"run": "long", **params}).json()  # type: ignore[arg-type]
            return answer["total"], [row["episode"] for row in answer["rows"]]

        assert ask(order="step", offset=19_900, limit=100) == (20_000, [f"e-{n:06d}" for n in range(19_900, 20_000)])
        forked = [row["episode_id"] for row in rows if row["forks"] and row["agents"] == ["agent-1"]]
        assert ask(agent="agent-1", fork="truncated", order="step", limit=5) == (len(forked), forked[:5])
        assert ask(text="E-012345") == (1, ["e-012345"])
        assert ask(error="timeout", finish="length", limit=1)[0] == sum(n % 350 == 0 for n in range(20_000))
        best = [row["episode_id"] for row in rows if row["reward"] == 1.0]
        assert ask(order="reward", limit=3) == (20_000, best[:-4:-1])
        assert ask(least=1) == (len(best), best[:-101:-1])
        assert len(session.get("/api/run?run=long").json()["steps"]) == 40


def test_a_hundred_thousand_tokens_scroll(browser: Any, tmp_path: Path):
    key = key_of(many_tokens(tmp_path / "long", 100_000, 500))
    with served(tmp_path, tmp_path) as address, leaving(browser) as driver:
        page = Page(driver, address)
        page.open(f"episode?run=long&episode={key}")
        page.wait(lambda: page.all(".tokens .t"))
        drawn = int(page.run("return document.querySelectorAll('.tokens .t').length"))
        assert 0 < drawn < 5000
        page.run("const box = document.querySelector('.tokens'); box.scrollTop = box.scrollHeight")
        page.wait(lambda: page.all("[data-at='99999']"))
        assert page.text().count("100,000") >= 1
        page.open(f"episode?run=long&episode={key}&token=54321")
        assert page.element(".t.at").get_attribute("data-at") == "54321"

"""Hostile or damaged content of a record is not executed and does not break the page."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.context_tracker.merge import build_samples
from astuner.schema import Episode, Fork, Judgement, LlmCall, Task
from astuner.viewer.index import key_of
from tests.viewer.browser import Page, leaving
from tests.viewer.conftest import client, served
from tests.viewer.records import open_record

RUNS = "window.hacked = 1"
HOSTILE = {
    "script": f"<script>{RUNS}</script><img src=x onerror='{RUNS}'><svg onload='{RUNS}'>",
    "quotes": f"\"'`><a href='javascript:{RUNS}'>x</a> ${{{RUNS}}} {{{{{RUNS}}}}} </script></style></textarea>",
    "controls": "\x00\x07\x1b[2J\x1b[31mred\x1b]8;;http://evil.example\x07link\r\x7f\x9b",
    "directions": "\u202egnp.exe\u2066\u2067\u200f\u200b\ufeff\u2028\u2029 שלום \U000e0041",
    "unseen": "a\u00a0b\u3000c\u202fd\u3164e\ufe0ff\u180eg\u2800h\u115fi\U000e0041",
    "surrogates": "a\ud800b\udfffc",
    "long": "x" * 1_000_000,
}
NAME = f"run <img src=x onerror='{RUNS}'>".replace("/", "")


def hostile_episode(text: str, name: str, ids: tuple[int, ...]) -> Episode:
    messages: tuple[Any, ...] = (
        {"role": text, "content": text, "name": text},
        {"role": "user", "content": [{"type": "text", "text": text}, text, {text: text}]},
        {"role": "assistant", "content": text, "reasoning_content": text,
         "tool_calls": [{"id": text, "function": {"name": text, "arguments": text}}, text]},
        {"role": "tool", "content": text, "tool_call_id": text},
        {"role": "assistant", "content": None, "tool_calls": text},
    )  # fmt: skip
    fork = Fork("truncated", name, 1, ids[:1], ids[1:2], text, text, 0)
    calls = tuple(
        LlmCall(
            f"{name}-{number}{text[:200]}", name, ids[: 3 + number], ids, tuple(-0.5 for _ in ids), "stop",
            agent_name=text, target_tag=text, messages=messages, fork=fork if number else None,
        )
        for number in range(2)
    )  # fmt: skip
    task = Task(f"{name} {text}", text, metadata={text: text})
    return Episode(
        f"{text}{name}", task, 0, "ok", 1.0, True, calls, tuple(build_samples(calls)), error_kind=text, error=text,
        metadata={text: text}, log_metrics={text: 1.0},
        judgement=Judgement(1.0, True, {text: 1.0}, explanation=text, metadata={text: text}, metrics={text: 1.0}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with hostile texts in names, messages, tokens, metrics and configuration, and with invalid bytes."""
    folder = tmp_path_factory.mktemp("hostile")
    bad = copy.deepcopy(tokenizer)
    words = [text for name, text in HOSTILE.items() if name != "surrogates"]
    bad.add_tokens(words)
    bad.save_pretrained(folder / "model")
    ids = (*bad.convert_tokens_to_ids(words), 5, 6, 10**6)
    with open_record(folder / NAME, str(folder / "model")) as record:
        for name, text in HOSTILE.items():
            record.write_episode(1, "train", hostile_episode(text, name, ids), 0.5)
            record.log_metrics(1, {text: 1.0, f"{text}/2": float("nan"), "reward/mean": 0.5})
    with (folder / NAME / "config.yaml").open("ab") as config:
        config.write(b"\nother: '<script>window.hacked = 1</script> \xff\xfe'\n")
    for file in ("episodes/index.jsonl", "metrics.jsonl"):
        with (folder / NAME / file).open("ab") as lines:
            lines.write(b'\xff\xfe"\n{"step": "<script>"}\n\x00\n')
    return folder


def test_the_api_answers(hostile: Path, tmp_path: Path):
    with client(hostile, tmp_path) as session:
        for path in ("runs", "run", "metrics", "config", "episodes"):
            response = session.get(f"/api/{path}", params={"run": NAME})
            assert response.status_code == 200, path
            assert len(response.content) < 100_000, path
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-content-type-options"] == "nosniff"
        assert session.get("/api/run", params={"run": NAME}).json()["counts"]["bad_lines"] == 6
        for name, text in HOSTILE.items():
            answer = session.get("/api/episode", params={"run": NAME, "episode": key_of(f"{text}{name}")})
            assert answer.status_code == 200
            assert answer.json()["messages"][0]["content"] == text


@pytest.fixture(scope="module")
def page(browser: Any, hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with served(hostile, tmp_path_factory.mktemp("cache")) as address, leaving(browser) as driver:
        yield Page(driver, address)


def assert_harmless(page: Page) -> None:
    assert page.run("return window.hacked") is None
    assert page.all("main script, main img, main iframe, main a[href^=javascript]") == []
    assert page.all("main .error[role=alert]") == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    odd = "[\\u0000-\\u0008\\u001b\\p{Cf}\\u3000\\u202f\\u2800\\p{Default_Ignorable_Code_Point}]"
    raw = page.run("return new RegExp(arguments[0], 'u').exec(document.body.innerText)?.[0]", odd)
    assert not raw, f"a character that cannot be seen reaches the page as it is: {raw!r}"
    assert page.complaints() == []


@pytest.mark.parametrize("place", ["runs", "run", "episodes", "step"])
def test_lists_are_harmless(page: Page, place: str):
    page.open(page.run("return arguments[0] + '?' + new URLSearchParams({run: arguments[1], step: 1})", place, NAME))
    assert_harmless(page)


@pytest.mark.parametrize("name", HOSTILE)
def test_episodes_and_groups_are_harmless(page: Page, name: str):
    text = HOSTILE[name]
    run = page.run("return new URLSearchParams({run: arguments[0]}).toString()", NAME)
    page.open(f"episode?{run}&episode={key_of(text + name)}&token=2")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.element(".t.at").click()
    page.wait(lambda: page.all(".tip:not([hidden])"))
    assert_harmless(page)
    page.open(f"group?{run}&step=1&task={key_of(f'{name} {text}')}")
    assert page.all(".side article")
    assert_harmless(page)
    other = next(each for each in HOSTILE if each != name)
    page.open(f"compare?{run}&episode={key_of(text + name)}&with={key_of(HOSTILE[other] + other)}")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.all(".pair")
    assert_harmless(page)
    page.open(f"task?{run}&task={key_of(f'{name} {text}')}")
    assert page.all("table.list tbody tr")
    assert_harmless(page)

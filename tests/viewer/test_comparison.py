"""Comparisons of two episodes, and a task over the steps."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.run_record import read_index, read_recorded_episode
from astuner.run_record.episode_file import EpisodeLabels, RecordedEpisode
from astuner.schema import LlmCall
from astuner.viewer.comparison import DiffBudget, compare, word_diff
from astuner.viewer.episode_view import verdict_view
from astuner.viewer.index import key_of
from tests.viewer.conftest import Ask, client
from tests.viewer.records import an_episode

TEXT = st.text(alphabet="ab \n.é", max_size=60)


def text_of(pieces: list[tuple[int, str]], kind: int | None = None) -> str:
    return "".join(text for each, text in pieces if kind is None or each == kind)


@given(TEXT, TEXT, st.integers(0, 2000))
def test_the_pieces_of_a_difference_add_up_to_the_texts(left: str, right: str, products: int):
    old, new = word_diff(left, right, DiffBudget(products))
    assert (text_of(old), text_of(new)) == (left, right)
    assert text_of(old, 0) == text_of(new, 0)
    if left == right:
        assert not text_of(old, 1)


def test_words_that_differ_are_marked():
    old, new = word_diff("The answer is 41.\nDone.\n", "The answer is 42.\nDone.\n", DiffBudget())
    assert old == [(0, "The answer is "), (1, "41"), (0, ".\nDone.\n")]
    assert new == [(0, "The answer is "), (1, "42"), (0, ".\nDone.\n")]


def test_long_texts_without_common_lines_exceed_the_budget():
    words = [str(number) for number in range(5000)]
    shuffled = random.Random(0).sample(words, len(words))
    old, new = word_diff(" ".join(["same", *words]), " ".join(["same", *shuffled]), DiffBudget())
    assert old[0][1].startswith("same")
    assert [kind for kind, _ in old] == [kind for kind, _ in new] == [0, 1]


def episode(*contents: tuple[str, str, str]) -> RecordedEpisode:
    """An episode with one call per assistant message, each with the messages before it."""
    messages: list[dict[str, Any]] = []
    calls = []
    for role, agent, text in contents:
        messages.append({"role": role, "content": text})
        if role == "assistant":
            name = f"c{len(calls)}"
            calls.append(LlmCall(name, "e", (1,), (2,), (-0.1,), "stop", agent_name=agent, messages=tuple(messages)))
    return RecordedEpisode(an_episode("e", "t", 0, tuple(calls)), EpisodeLabels(1, "train"), None, ())


def test_messages_are_aligned_by_text_and_speaker():
    left = episode(("user", "", "2+2?"), ("assistant", "solver", "It is 5"), ("user", "", "Sure?"),
                   ("assistant", "critic", "No"))  # fmt: skip
    right = episode(("user", "", "2+2?"), ("assistant", "solver", "It is 4"), ("assistant", "critic", "No"))
    rows = compare(left, right)["rows"]
    shown = [[side and (side["role"], side["agent"]) for side in (row["left"], row["right"])] for row in rows]
    assert shown == [
        [("user", ""), ("user", "")],
        [("assistant", "solver"), ("assistant", "solver")],
        [("user", ""), None],
        [("assistant", "critic"), ("assistant", "critic")],
    ]
    assert [row["same"] for row in rows] == [True, False, False, True]
    assert rows[1]["left"]["pieces"] == [(0, "It is "), (1, "5")]


def test_an_episode_that_repeats_its_conversation_is_compared_once_per_message():
    once = episode(("user", "", "hi"), ("assistant", "", "hi"), ("user", "", "hi"), ("assistant", "", "hi"))
    calls = once.episode.calls
    copies = tuple(replace(call, messages=tuple(dict(message) for message in call.messages)) for call in calls)
    again = replace(once, episode=replace(once.episode, calls=copies))
    rows = compare(once, again)["rows"]
    assert [row["same"] for row in rows] == [True] * 4


def test_the_verdict_names_the_fields_of_the_judge():
    made = episode(("user", "", "2+2?"), ("assistant", "", "It is 4")).episode
    assert verdict_view(made, {}) == {
        "expected": {"answer": "3"}, "answer": "It is 4", "answer_source": "last message", "judge": None,
        "judge_params": {},
    }  # fmt: skip
    config = {
        "astuner.task_judge.judge_protocol": "my.judge->Judge",
        "astuner.task_judge.params.answer_field": "guess",
        "astuner.task_judge.params.reference_field": "truth",
    }
    with_fields = replace(
        made, metadata={"guess": "5"}, task=replace(made.task, metadata={"truth": [4], "answer": "", "x": 1})
    )
    view = verdict_view(with_fields, config)
    assert (view["expected"], view["answer"], view["answer_source"]) == ({"truth": [4]}, "5", "guess")
    assert (view["judge"], view["judge_params"]["answer_field"]) == ("my.judge->Judge", "guess")


def test_two_episodes_are_compared_across_runs(ask: Ask, runs: Path):
    entries = [entry for entry in read_index(runs / "first") if entry.task_id == "sum/0" and entry.repeat_index == 0]
    wrong = next(entry for entry in entries if entry.reward == 0)
    right = next(entry for entry in entries if entry.reward == 1)
    query = {"run": "first", "episode": key_of(wrong.episode_id), "with": key_of(right.episode_id)}
    answer = ask("compare", **query, with_run="second")
    assert (answer["left"]["run"], answer["right"]["run"]) == ("first", "second")
    assert (answer["left"]["episode"]["reward"], answer["right"]["episode"]["reward"]) == (0, 1)
    assert answer["left"]["verdict"]["expected"] == {"answer": "3"}
    last = answer["rows"][-1]
    changed = [[text for kind, text in last[side]["pieces"] if kind] for side in ("left", "right")]
    assert changed == [["4", "4"], ["3", "3"]]
    assert all(row["same"] for row in answer["rows"][:-1])


def test_a_task_over_the_steps(ask: Ask, runs: Path):
    entries = [entry for entry in read_index(runs / "first") if entry.task_id == "sum/1"]
    steps = ask("task", run="first", task=key_of("sum/1"))["steps"]
    assert [(row["split"], row["step"], row["episodes"], row["failed"]) for row in steps] == [
        ("train", step, 3, 1) for step in (1, 2, 3)
    ]
    rewards = [entry.reward for entry in entries if entry.step == 2 and entry.reward is not None]
    assert steps[1]["reward"] == pytest.approx(sum(rewards) / len(rewards))
    picks = ask("picks", run="first", task=key_of("sum/1"))
    assert (picks["best"]["reward"], picks["worst"]["reward"]) == (1, 0)
    assert (picks["first"]["step"], picks["last"]["step"]) == (1, 3)
    assert ask("picks", run="first", task="none") == dict.fromkeys(("best", "worst", "first", "last"))


def test_an_episode_is_downloaded(runs: Path, tmp_path: Path):
    entry = next(entry for entry in read_index(runs / "first") if entry.status == "ok")
    key = key_of(entry.episode_id)
    with client(runs, tmp_path) as session:
        page = session.get("/api/export", params={"run": "first", "episode": key})
        assert page.headers["content-disposition"] == f'attachment; filename="{Path(entry.path).stem}.html"'
        assert page.text.startswith("<!doctype html>")
        data = session.get("/api/export", params={"run": "first", "episode": key, "format": "json"})
        assert data.headers["content-disposition"].endswith('.json"')
        assert data.content == (runs / "first" / entry.path).read_bytes()
        assert json.loads(data.content)["episode"]["episode_id"] == entry.episode_id
        assert session.get("/api/export", params={"run": "first", "episode": "none"}).status_code == 404
        around = session.get("/api/episode", params={"run": "first", "episode": key}).json()
        order = [key_of(each.episode_id) for each in read_index(runs / "first") if each.step == entry.step]
        assert around["neighbours"] == {"previous": None, "next": order[1]}
        assert around["picks"]["best"]["reward"] == 1
    assert read_recorded_episode(runs / "first" / entry.path).episode.episode_id == entry.episode_id

"""The search in messages, answers and errors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from astuner.context_tracker.merge import build_samples
from astuner.run_record.record import RunRecord
from astuner.schema import Episode, LlmCall, Task
from astuner.viewer import text_index
from astuner.viewer.database import remove_least_recent
from astuner.viewer.text_query import excerpt, parse_query
from tests.viewer.conftest import client
from tests.viewer.records import open_record

ANSWERS = [
    "The answer is \\boxed{42}, since 6*7 = 42.",
    'He said "never again" and left; it\'s over.',
    "答案是四十二。我们用乘法计算。",
    "Great 🎉🙂 we won!",
    "Le café est fermé (naïve).",
    "foo->bar ??? %s <b>&amp;</b>",
    "정답은 사십이입니다",
    "x" * 300_000 + " needle at the end",
]


def say(record: RunRecord, step: int, name: str, answer: str, **fields: Any) -> None:
    messages = ({"role": "user", "content": "Think about apples."}, {"role": "assistant", "content": answer})
    call = LlmCall(name, name, (1, 2), (3, 4), (-0.1, -0.2), "stop", messages=messages)
    values: dict[str, Any] = {"status": "ok", "reward": 1.0, "is_success": True, **fields}
    samples = tuple(build_samples([call]))
    episode = Episode(name, Task(f"t/{name}", "?"), 0, calls=(call,), samples=samples, **values)
    record.write_episode(step, "train", episode, 0.5)


Find = Callable[..., list[str]]


def finder(session: TestClient, run: str = "run") -> Find:
    """Return a function that searches until the search is complete, and returns the episodes' ids."""

    def find(text: str, **params: Any) -> list[str]:
        page: dict[str, Any] = {}
        for _ in range(2000):
            page = session.get("/api/episodes", params={"run": run, "text": text, **params}).json()
            if page["search"]["done"]:
                break
            time.sleep(0.01)
        assert page["search"]["done"]
        assert page["search"]["error"] is None
        find.page = page  # type: ignore[attr-defined]
        return sorted(row["episode"] for row in page["rows"])

    return find


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken")
    with open_record(folder / "run") as record:
        for number, answer in enumerate(ANSWERS):
            say(record, 1, f"e{number}", answer)
        failed: dict[str, Any] = {"status": "failed", "reward": None, "is_success": None, "error_kind": "workflow"}
        traceback = "Traceback\n  in fetch\nConnectionError: no route to calculator"
        say(record, 1, "failed", "?", error="it broke", error_traceback=traceback, **failed)
    return folder


@pytest.fixture
def find(spoken: Path, tmp_path: Path) -> Iterator[Find]:
    with client(spoken, tmp_path) as session:
        yield finder(session)


def test_words_phrases_prefixes_and_parts_of_words(find: Find):
    assert find("answer boxed") == ["e0"]
    assert find('"never again"') == find('"NEVER again') == ["e1"]
    assert find('"again never"') == []
    assert find("nev*") == ["e1"]
    assert find("eve") == ["e1"], "a part of a word, if no whole word matches"
    assert find.page["search"]["mode"] == "parts"  # type: ignore[attr-defined]
    assert find("\\boxed{42}") == find("6*7 = 42") == ["e0"]
    assert find("it's over") == ["e1"]
    assert find("cafe") == find("CAFÉ") == find("naive") == ["e4"]
    assert find("->") == find("???") == find("<b>") == ["e5"]
    assert find("答案") == find("乘法计算") == find('"四十二"') == ["e2"]
    assert find("四二") == []
    assert find("🎉") == find("🎉🙂") == ["e3"]
    assert find("정답") == find("사십이") == ["e6"]
    assert find("needle") == ["e7"]
    assert find.page["search"]["cut"] == 1  # type: ignore[attr-defined]
    assert len(find("apples")) == 9


def test_a_search_may_be_restricted_to_answers_or_errors(find: Find):
    assert find("apples", where="answers") == []
    assert find("t/e1", where="answers") == []
    assert find("t/e1") == ["e1"]
    assert find("answer", where="answers") == ["e0"]
    assert find("calculator", where="errors") == find("calculator") == ["failed"]
    assert find("calculator", where="answers") == []
    assert find("apples", status="failed") == ["failed"]


def test_excerpts_mark_the_matches(find: Find):
    def marked(text: str, **params: Any) -> tuple[str, list[str], str]:
        find(text, **params)
        (row,) = find.page["rows"]  # type: ignore[attr-defined]
        parts = row["excerpt"]["parts"]
        return row["excerpt"]["role"], [part for part, hit in parts if hit], "".join(part for part, _ in parts)

    assert marked("boxed 42") == ("assistant", ["boxed", "42", "42"], ANSWERS[0])
    assert marked("cafe") == ("assistant", ["café"], ANSWERS[4])
    assert marked("乘法") == ("assistant", ["乘法"], ANSWERS[2])
    assert marked("🎉🙂")[1] == ["🎉🙂"]
    assert marked("->")[1] == ["->"]
    assert marked("nev*")[1] == ["never"]
    role, hits, text = marked("needle")
    assert (role, hits) == ("assistant", ["needle"])
    assert text.startswith("…")
    assert len(text) < 300
    assert marked("calculator")[0] == "error traceback"


HOSTILE = ['"', '""', '"""', "'", "*", "a*b*", "**", "-", "NOT", "AND OR NOT", "NEAR(a b)", "a NEAR b", "prompts:x",
           "{answers}: x", "^a", "(", ")", "(()", "a AND", "+", "\\", "%", "_", "\0", "a\x1e\x1f", "\ud800", "é",
           "\u200d", "👩‍👩‍👧", "🏳️‍🌈", "ﷺ", "İ", "ß", "a" * 5000, "a " * 500, "😀" * 300, "𠀀", "; drop table texts",
           "emoji1f389", "\u202e", "１２"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_every_text_is_a_valid_query(find: Find, text: str):
    page = find(text.encode("utf-8", "replace").decode())
    assert isinstance(page, list)


def test_every_text_is_a_valid_query_of_an_excerpt():
    for text in HOSTILE:
        for by_words in (True, False):
            for content in (*HOSTILE, *ANSWERS[:7]):
                shown = excerpt(parse_query(text), [("answers", "assistant", content)], None, by_words=by_words)
                assert shown is None or len("".join(part for part, _ in shown.parts)) < 700


def test_new_episodes_of_a_live_run_and_removed_ones(tmp_path: Path):
    with open_record(tmp_path / "run") as record, client(tmp_path, tmp_path / "cache") as session:
        find = finder(session)
        assert find("apples") == []
        say(record, 1, "a", "first")
        say(record, 2, "b", "second")
        assert find("apples") == ["a", "b"]
        say(record, 2, "b", "other words")
        assert find("second") == []
        assert find("other") == ["b"]
        record.truncate_after(1)
        assert find("apples") == ["a"]
        assert find("other") == []
        say(record, 2, "c", "a third answer")
        assert find("third") == ["c"]
        for file in (tmp_path / "cache").glob("*.text*"):
            file.unlink()
        assert find("third") == ["c"], "the user may delete the cache at any time"


def test_a_damaged_file_and_a_damaged_database_do_not_end_the_search(spoken: Path, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        say(record, 1, "a", "first")
        say(record, 1, "b", "first")
    index = tmp_path / "run/episodes/index.jsonl"
    rows = [json.loads(line) for line in index.read_bytes().splitlines()]
    (tmp_path / "run" / rows[0]["path"]).write_text("{")
    rows.append(rows[1] | {"episode_id": "c", "path": "../outside.json"})
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "outside.json").write_text((tmp_path / "run" / rows[1]["path"]).read_text())
    (tmp_path / "cache").mkdir()
    text_index.text_database(tmp_path / "run", tmp_path / "cache").write_bytes(b"no database " * 1000)
    with client(tmp_path, tmp_path / "cache") as session:
        assert finder(session)("apples") == ["b"], "a file outside of the run is not searched"


def test_a_database_that_is_damaged_later_is_created_again(tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        for number in range(40):
            say(record, 1, f"e{number}", f"apple {number} " + " ".join(f"w{number}x{i}" for i in range(200)))
    with client(tmp_path, tmp_path / "cache") as session:
        assert finder(session)("w7x3") == ["e7"]
    file = text_index.text_database(tmp_path / "run", tmp_path / "cache")
    data = file.read_bytes()
    file.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    with client(tmp_path, tmp_path / "cache") as session:
        assert finder(session)("w7x3") == ["e7"]


def test_files_that_cannot_be_read_at_present_are_reported_and_read_later(tmp_path: Path):
    with open_record(tmp_path / "run") as record, client(tmp_path, tmp_path / "cache") as session:
        say(record, 1, "a", "first")
        say(record, 1, "b", "first")
        (file,) = (tmp_path / "run/episodes").rglob("*b*.json")
        file.rename(tmp_path / "moved")
        page: dict[str, Any] = {}
        for _ in range(2000):
            page = session.get("/api/episodes", params={"run": "run", "text": "apples"}).json()
            if page["search"]["error"]:
                break
            time.sleep(0.01)
        assert page["search"]["error"] == (
            "The texts of 1 episode are not searched, because their files cannot be read."
        )
        (tmp_path / "moved").rename(file)
        say(record, 1, "c", "first")
        assert finder(session)("apples") == ["a", "b", "c"]


def test_the_size_of_the_database_is_bounded(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(text_index, "MAX_BYTES", 120_000)
    monkeypatch.setattr(text_index, "_BATCH", 1)
    with open_record(tmp_path / "run") as record:
        for number in range(60):
            say(record, 1, f"e{number}", f"apple {number} " + " ".join(f"w{number}x{i}" for i in range(200)))
    with client(tmp_path, tmp_path / "cache") as session:
        for _ in range(2000):
            page = session.get("/api/episodes?run=run&text=apple").json()
            if page["search"]["error"]:
                break
            time.sleep(0.01)
        assert "oldest episodes are not searched" in page["search"]["error"]
        assert 0 < page["total"] < 60
        assert page["rows"][0]["episode"] == "e59", "the latest episodes are searched"


def test_the_least_recent_databases_are_removed(tmp_path: Path):
    for number in range(4):
        file = tmp_path / f"{number}.sqlite3"
        file.write_bytes(b"0" * 100)
        file.with_name(f"{file.name}-wal").write_bytes(b"")
        os.utime(file, (number, number))
    remove_least_recent(tmp_path, 250, keep=tmp_path / "0.sqlite3")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.sqlite3", "0.sqlite3-wal", "3.sqlite3", "3.sqlite3-wal",
    ]  # fmt: skip


def test_answers_of_records_without_them_come_from_the_files(tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        say(record, 1, "a", "  the   answer\nof a ")
        say(record, 1, "b", "long " * 100 + "end")
    index = tmp_path / "run/episodes/index.jsonl"
    rows = [json.loads(line) for line in index.read_bytes().splitlines()]
    assert rows[0]["answer"] == "the answer of a"
    assert rows[1]["answer"].endswith("… " + ("long " * 100 + "end")[-150:])
    index.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "answer"}) + "\n" for row in rows))
    with client(tmp_path, tmp_path / "cache") as session:
        assert finder(session)("apples") == ["a", "b"]
        shown = {row["episode"]: row["answer"] for row in session.get("/api/episodes?run=run").json()["rows"]}
        assert shown == {row["episode_id"]: row["answer"] for row in rows}

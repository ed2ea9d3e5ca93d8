"""Damage of a record only affects the damaged content on the page."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from astuner.context_tracker.merge import build_samples
from astuner.errors import RecordError
from astuner.run_record import read_index
from astuner.run_record.updates import SampleUpdate, count_trained_tokens
from astuner.schema import Episode, Task
from astuner.viewer.comparison import compare
from astuner.viewer.episode_view import episode_view, read_episode_at, transcript
from astuner.viewer.http_server import RequestGuard
from astuner.viewer.index import key_of
from astuner.viewer.token_texts import TokenTexts
from tests.viewer.conftest import client
from tests.viewer.records import Agents, open_record, write_step


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("episodes/index.jsonl", {"step": 10**30}),
        ("episodes/index.jsonl", {"step": -(10**30)}),
        ("episodes/index.jsonl", {"forks": {"truncated": 10**30}}),
        ("episodes/index.jsonl", {"forks": {"truncated": float("inf")}}),
        ("metrics.jsonl", {"step": 1e20}),
        ("metrics.jsonl", {"time": float("inf")}),
    ],
)
def test_a_number_too_large_for_the_database_is_a_damaged_line(
    agents: Agents, tmp_path: Path, file: str, damage: dict[str, Any]
):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1, tasks=1, repeats=1)
    lines = (tmp_path / "run" / file).read_bytes().splitlines(keepends=True)
    bad = json.dumps(json.loads(lines[0]) | {"path": "elsewhere.json"} | damage).encode() + b"\n"
    (tmp_path / "run" / file).write_bytes(b"".join([bad, *lines]))
    with client(tmp_path, tmp_path) as session:
        counts = session.get("/api/run?run=run").json()["counts"]
        assert counts == {"episodes": 1, "failed": 0, "step": 1, "bad_lines": 1}
        assert len(session.get("/api/runs").json()) == 1
        assert len(session.get("/api/metrics?run=run").json()["series"]["reward/mean"]) == 1


def test_sums_of_damaged_counts_do_not_overflow(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1, tasks=1, repeats=3)
    index = tmp_path / "run/episodes/index.jsonl"
    *others, last = (json.loads(line) for line in index.read_bytes().splitlines())
    rows = [*(row | {"tokens_raw": 2**62} for row in others), last]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with client(tmp_path, tmp_path) as session:
        (step,) = session.get("/api/run?run=run").json()["steps"]
        assert (step["episodes"], step["tokens_raw"]) == (3, last["tokens_raw"])


def test_an_unreadable_run_does_not_affect_others(agents: Agents, tmp_path: Path):
    for name in ("good", "bad", "odd", "deep"):
        with open_record(tmp_path / name) as record:
            write_step(record, agents, 1, tasks=1, repeats=1)
    (tmp_path / "bad/episodes/index.jsonl").unlink()
    (tmp_path / "bad/episodes/index.jsonl").mkdir()
    (tmp_path / "odd/config.yaml").write_text("a: &a\n  b: *a\nc: 2001-99-99\n")
    (tmp_path / "deep/environment.json").write_text("[" * 100_000)
    with client(tmp_path, tmp_path) as session:
        for _ in range(2):
            rows = {row["name"]: row for row in session.get("/api/runs").json()}
            assert {name: row["state"] for name, row in rows.items()} == {
                "good": "stopped", "bad": "unreadable", "odd": "stopped",
            }  # fmt: skip
            assert rows["good"]["counts"]["episodes"] == rows["odd"]["counts"]["episodes"] == 1
            assert "index.jsonl" in rows["bad"]["error"]
            assert rows["bad"].keys() - {"error"} == rows["good"].keys()
        assert session.get("/api/run?run=bad").status_code == 404
        assert session.get("/api/run?run=good").status_code == 200


BAD_VALUES: tuple[Any, ...] = (
    None, True, -1, 2**40, 10**30, 1.5, float("inf"), float("nan"), "", "Infinity", "\x00", [], [[]], {}, {"a": [None]},
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value of a JSON document; only the ends of long lists of numbers."""
    if isinstance(tree, dict):
        keys: Any = tree
    elif isinstance(tree, list):
        keys = {0, len(tree) - 1} if tree else ()
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from places(tree[key], (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = copy.copy(tree)
    copied[path[0]] = value if len(path) == 1 else replaced(tree[path[0]], path[1:], value)
    return copied


def trained_episode(agents: Agents, merge: str) -> Episode:
    calls = agents.solve("e", "What is 1 + 2?", "3", forks=True)
    return Episode("e", Task("t", "?"), 0, "ok", 1.0, True, calls, tuple(build_samples(calls, merge=merge)))  # type: ignore[arg-type]


@pytest.mark.parametrize("merge", ["leaf", "tree"])
def test_a_damaged_episode_is_shown_or_reported(agents: Agents, tmp_path: Path, merge: str):
    texts = TokenTexts(agents.tokenizer.backend_tokenizer)
    episode = trained_episode(agents, merge)
    counts = [count_trained_tokens(sample) for sample in episode.samples]
    updates = [SampleUpdate(((count, 0.5),), (-0.5,) * count, (0.25,) * count) for count in counts]
    with open_record(tmp_path / "run") as record:
        file = record.write_episode(1, "train", episode, 0.5, updates=updates)
    document = json.loads(file.read_bytes())
    path = file.relative_to(tmp_path / "run").as_posix()
    rejected = shown = 0
    for number, place in enumerate(places(document)):
        # A third of the values at each path, with different values at the next.
        for value in BAD_VALUES[number % 3 :: 3]:
            file.write_text(json.dumps(replaced(document, place, value)))
            try:
                recorded = read_episode_at(tmp_path / "run", path)
            except RecordError:
                rejected += 1
                continue
            shown += 1
            episode_view(recorded, texts, {})
            compare(recorded, recorded)
            transcript(recorded.episode)
    assert rejected > 300
    assert shown > 300


def test_a_damaged_episode_does_not_affect_its_group(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1, tasks=1, repeats=3)
    first, second, third = read_index(tmp_path / "run")
    for entry, place, value in (
        (first, ("episode", "calls", 0, "start_time"), 1e999),
        (second, ("episode", "calls"), {"a": 1}),
    ):
        file = tmp_path / "run" / entry.path
        file.write_text(json.dumps(replaced(json.loads(file.read_bytes()), place, value)))
    index = tmp_path / "run/episodes/index.jsonl"
    index.write_text(index.read_text().replace(third.path, "episodes/\\u0000.json"))
    with client(tmp_path, tmp_path) as session:
        rows = session.get(f"/api/group?run=run&step=1&task={key_of('sum/0')}").json()["rows"]
        assert [row["episode"] for row in rows if "unreadable" not in row] == [first.episode_id]
        assert len(rows) == 3
        for entry, code in ((first, 200), (second, 404), (third, 404)):
            answer = session.get(f"/api/episode?run=run&episode={key_of(entry.episode_id)}")
            assert answer.status_code == code, answer.text


@pytest.mark.parametrize(
    "request_path",
    ["groups?step=1{}", "group?task=x&step=1{}", "episodes?offset=1{}", "episodes?step=1{}", "metrics?after=1{}"],
)
def test_numbers_in_the_address_are_bounded(runs: Path, tmp_path: Path, request_path: str):
    with client(runs, tmp_path) as page:
        answer = page.get(f"/api/{request_path.format('0' * 30)}&run=first")
        assert answer.status_code in (200, 422)
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_unexpected_errors_are_answered_with_security_headers():
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("of all things")

    answer = TestClient(RequestGuard(fails, ["page:1"]), base_url="http://page:1").get("/api/runs")
    assert answer.status_code == 500
    assert "ZeroDivisionError: of all things" in answer.json()["error"]
    assert answer.headers["x-content-type-options"] == "nosniff"

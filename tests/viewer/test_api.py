"""The viewer's API, compared with the record."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from astuner.errors import RecordError
from astuner.run_record import read_episode, read_index, read_metrics, read_recorded_episode
from astuner.run_record.recorded_run import config_difference
from astuner.system.localhost import local_hosts
from astuner.viewer.index import RunIndex, key_of
from astuner.viewer.runs import Runs
from tests.viewer.conftest import Ask, client
from tests.viewer.records import Agents, open_record, write_step


def test_runs_and_metrics_equal_the_record(ask: Ask, runs: Path):
    assert {run["name"] for run in ask("runs")} == {"first", "second"}
    answer = ask("metrics", run="first")
    series = answer["series"]
    rows = read_metrics(runs / "first")
    assert [value for _, _, value in series["reward/mean"]] == [row.metrics["reward/mean"] for row in rows]
    assert ask("metrics", run="first", after=answer["last"], generation=answer["generation"])["series"] == {}


def test_config_difference(ask: Ask):
    differs = ask("config", run=["first", "second"])["differs"]
    assert differs == [{"key": "astuner.trainer_common.optim.lr", "values": [1e-06, 3e-06]}]


def test_values_that_are_equal_in_python_differ_in_a_configuration(tmp_path: Path):
    for name, config in (
        ("one", "a: 1\nb: {}\nc: .nan\nd: [1, {e: 0}]\nf: 2\n"),
        ("two", "a: true\nc: .nan\nd: [1, {e: 0.0}]\nf: 2\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config)
    differs = {
        row["key"]: row["values"] for row in config_difference({name: tmp_path / name for name in ("one", "two")})
    }
    assert differs.keys() == {"a", "b", "d"}
    assert differs["b"] == [{}, None]


def test_steps_and_groups_add_up(ask: Ask, runs: Path):
    entries = [entry for entry in read_index(runs / "first") if entry.step == 2]
    (step,) = [row for row in ask("run", run="first")["steps"] if row["step"] == 2]
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    assert step["episodes"] == len(entries)
    assert step["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert step["failed"] == 1
    assert step["tokens_distinct"] == sum(entry.tokens_distinct or 0 for entry in entries)
    assert sum(row["episodes"] for row in ask("groups", run="first", step=2)) == len(entries)
    group = ask("group", run="first", step=2, task=key_of("sum/0"))["rows"]
    assert [row["reward"] for row in group] == sorted((row["reward"] for row in group), reverse=True)
    assert group[0]["transcript"][0] == {
        "role": "user",
        "name": "",
        "agent": "",
        "content": "What is 1 + 2?",
        "tool_calls": [],
    }


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        ({"agent": "critic"}, lambda entry: "critic" in entry.agents),
        ({"tag": "default"}, lambda entry: "default" in entry.tags),
        ({"finish": "stop"}, lambda entry: "stop" in entry.finish_reasons),
        ({"fork": "tools_changed"}, lambda entry: "tools_changed" in entry.forks),
        ({"error": "workflow"}, lambda entry: entry.error_kind == "workflow"),
        ({"error": "any"}, lambda entry: entry.error_kind is not None),
        ({"least": "0.5"}, lambda entry: entry.reward is not None and entry.reward >= 0.5),
        ({"most": "0.5", "step": "2"}, lambda entry: entry.reward == 0 and entry.step == 2),
        ({"text": "SUM/1-2"}, lambda entry: entry.episode_id.endswith("sum/1-2")),
        ({"text": "the TOOL was not"}, lambda entry: entry.error_kind == "workflow"),
        ({"text": "' or 1 --"}, lambda entry: False),
        ({"agent": "nobody"}, lambda entry: False),
    ],
)
def test_filters(ask: Ask, runs: Path, filters: dict[str, str], holds: Any):
    expected = sorted(entry.episode_id for entry in read_index(runs / "first") if holds(entry))
    answer = ask("episodes", run="first", **filters)
    assert sorted(row["episode"] for row in answer["rows"]) == expected
    assert answer["total"] == len(expected)


def test_an_episode_has_all_calls_and_masks(ask: Ask, runs: Path):
    entry = next(entry for entry in read_index(runs / "first") if entry.forks)
    episode = read_episode(runs / "first" / entry.path)
    view = ask("episode", run="first", episode=key_of(entry.episode_id))
    segments = view["segments"]
    assert view["tokens"]["distinct"] == entry.tokens_distinct == sum(len(segment["ids"]) for segment in segments)
    for call, shown in zip(episode.calls, view["calls"], strict=True):
        ids = [number for part in shown["path"] for number in segments[part]["ids"]]
        assert tuple(ids) == call.prompt_ids + call.completion_ids
        assert tuple(view["messages"][number] for number in shown["messages"]) == call.messages
    stretches = [run for part in segments for run in part["trained"]]
    trained = sum((run["to"] - run["from"]) * run["mask"] for run in stretches)
    assert trained == view["tokens"]["trained"] == sum(sum(sample.train_counts) for sample in episode.samples)
    recorded = read_recorded_episode(runs / "first" / entry.path)
    current = [value for update in recorded.updates for value in update.logprobs or ()]
    shown = [value for run in stretches if run["mask"] for value in run["logprobs"]]
    assert sorted(shown) == pytest.approx(sorted(current), abs=1e-4)
    assert {run["advantage"] for run in stretches if run["mask"]} == {entry.advantage}
    sampled = sum(len(run["logprobs"]) for part in segments for run in part["sampled"])
    assert sampled == sum(len(call.completion_ids) for call in episode.calls)
    assert {call["fork"]["cause"] for call in view["calls"] if call["fork"]} == set(entry.forks or ())
    judgement = view["episode"]["judgement"]
    assert (judgement["reward"], judgement["components"]["brief"]) == (episode.reward, 0.25)
    assert judgement["explanation"].startswith("the answer is ")


def test_template_and_texts(ask: Ask, runs: Path, tokenizer: Any):
    entry = read_index(runs / "first")[0]
    view = ask("episode", run="first", episode=key_of(entry.episode_id))
    first, *_ = view["segments"]
    inside = set(range(len(first["ids"])))
    for start, end in first["template"]:
        inside -= set(range(start, end))
    sampled = {run["from"] + place for run in first["sampled"] for place in range(len(run["logprobs"]))}
    text = "".join(view["vocabulary"][str(first["ids"][place])] for place in sorted(inside - sampled))
    assert "What is 1 + 2?" in text
    assert "<|im_start|>" not in text
    assert view["vocabulary"][str(tokenizer.eos_token_id)] == "<|im_end|>"


def test_new_lines_are_read_and_a_resumed_record_is_read_again(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "live") as record, client(tmp_path, tmp_path / "cache") as session:

        def episodes() -> int:
            return int(session.get("/api/episodes?run=live").json()["total"])

        (tmp_path / "cache").mkdir(exist_ok=True)
        write_step(record, agents, 1)
        assert episodes() == 6
        assert session.get("/api/run?run=live").json()["state"] == "running"
        write_step(record, agents, 2)
        assert episodes() == 12
        previous = session.get("/api/metrics?run=live").json()["last"]
        record.truncate_after(1)
        assert episodes() == 6
        after = session.get(f"/api/metrics?run=live&after={previous}").json()
        assert after["restarted"]
        write_step(record, agents, 2, repeats=1)
        assert episodes() == 8
        record.close()
        assert session.get("/api/run?run=live").json()["state"] == "stopped"


def test_metrics_of_a_restarted_run_are_distinguished_from_earlier_ones(agents: Agents, tmp_path: Path):
    def write(steps: range, lag: float) -> None:
        with open_record(tmp_path / "run") as record:
            for step in steps:
                write_step(record, agents, step, tasks=0, lag=lag)

    def rewards(answer: dict[str, Any]) -> list[float]:
        return [value for _, _, value in answer["series"].get("reward/mean", [])]

    with client(tmp_path, tmp_path) as session:

        def ask(previous: dict[str, Any] | None = None) -> Any:
            query = {"after": previous["last"], "generation": previous["generation"]} if previous else {}
            return session.get("/api/metrics", params={"run": "run", **query}).json()

        write(range(3), lag=0.0)
        previous = ask()
        assert not ask(previous)["restarted"]
        assert rewards(ask(previous)) == []
        # Another run with the same name writes at least as many rows before the next request.
        write(range(5), lag=9.0)
        now = ask(previous)
        assert now["restarted"]
        assert rewards(now) == [row.metrics["reward/mean"] for row in read_metrics(tmp_path / "run")]
        assert len(rewards(now)) == 5
        assert now["generation"] != previous["generation"]
        assert not ask(now)["restarted"]


def test_damaged_lines_are_counted(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1)
    index = tmp_path / "run/episodes/index.jsonl"
    index.write_bytes(index.read_bytes() + b'\xff\xfe\n[1]\n{"step": "x"}\n' + b"[" * 100_000 + b"\n{not whole")
    with RunIndex(tmp_path / "run", tmp_path).reading() as db:
        assert db.execute("select count(*) from episodes").fetchone()[0] == 6
        assert db.execute("select sum(bad) from positions").fetchone()[0] == 4


def test_the_record_is_never_written_to(runs: Path, tmp_path: Path):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    with client(runs, tmp_path) as session:
        for path in ("runs", "run?run=first", "metrics?run=first", "episodes?run=first", "config?run=first"):
            assert session.get(f"/api/{path}").status_code == 200
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


def test_a_temporary_folder_is_used_if_the_cache_cannot_be_written(runs: Path, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    index = RunIndex(runs / "first")
    with index.reading() as db:
        assert db.execute("select count(*) from episodes").fetchone()[0] == 18
    index.close()


def test_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(RecordError, match="give a run's folder or a folder with runs"):
        Runs(tmp_path / "nothing")


def test_runs_can_appear_in_an_empty_folder(agents: Agents, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("of mine")
    runs = Runs(tmp_path)
    assert runs.all() == {}
    open_record(tmp_path / "run").close()
    assert list(runs.all()) == ["run"]


def test_browsers_omit_the_default_port():
    assert set(local_hosts(80)) == {"127.0.0.1", "localhost", "127.0.0.1:80", "localhost:80"}
    assert set(local_hosts(8765)) == {"127.0.0.1:8765", "localhost:8765"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"host": "localhost:1234"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1:9"}, 403),
        ({"origin": "http://127.0.0.1:1234"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ],
)
def test_foreign_requests_are_rejected(runs: Path, tmp_path: Path, headers: dict[str, str], code: int):
    with client(runs, tmp_path) as session:
        for path in ("/", "/api/runs"):
            response = session.get(path, headers=headers)
            assert response.status_code == code
            assert "script-src 'self'" in response.headers["content-security-policy"]
        assert session.post("/api/runs").status_code == 405
        assert session.get("/../pyproject.toml").status_code == 404
        assert session.get("/docs").status_code == 404


def test_files_outside_the_run_are_not_read(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1)
    index = tmp_path / "run/episodes/index.jsonl"
    row = json.loads(index.read_bytes().splitlines()[0])
    os.rename(tmp_path / "run" / row["path"], tmp_path / "moved.json")
    row["path"] = "../moved.json"
    index.write_text(json.dumps(row) + "\n")
    with client(tmp_path, tmp_path / "cache") as session:
        (tmp_path / "cache").mkdir(exist_ok=True)
        answer = session.get("/api/episode", params={"run": "run", "episode": key_of(row["episode_id"])})
        assert answer.status_code == 404
        assert "outside" in answer.json()["error"]


def test_browsers_cache_static_files_only(runs: Path, tmp_path: Path):
    with client(runs, tmp_path) as session:
        page = session.get("/")
        assert page.headers["cache-control"] == "no-cache"
        files = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
        assert {Path(file).suffix for file in files} == {".js", ".css", ".svg"}
        for file in files:
            response = session.get(f"/{file}")
            assert response.status_code == 200, file
            assert "immutable" in response.headers["cache-control"]
            assert response.headers["x-content-type-options"] == "nosniff"
        assert session.get("/api/runs").headers["cache-control"] == "no-cache"
        assert session.get("/js/app.js").status_code == 404

"""A record that a disk, a kill or a hand damaged costs the page what was damaged, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
def test_a_number_that_no_database_holds_is_a_damaged_line(
    agents: Agents, tmp_path: Path, file: str, damage: dict[str, Any]
):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1, tasks=1, repeats=1)
    lines = (tmp_path / "run" / file).read_bytes().splitlines(keepends=True)
    bad = json.dumps(json.loads(lines[0]) | {"path": "elsewhere.json"} | damage).encode() + b"\n"
    (tmp_path / "run" / file).write_bytes(b"".join([bad, *lines]))
    with client(tmp_path, tmp_path) as asked:
        assert asked.get("/api/run?run=run").json()["counts"] == {"episodes": 1, "step": 1, "bad_lines": 1}
        assert len(asked.get("/api/runs").json()) == 1
        assert len(asked.get("/api/metrics?run=run").json()["series"]["reward/mean"]) == 1


def test_sums_of_damaged_counts_do_not_overflow(agents: Agents, tmp_path: Path):
    with open_record(tmp_path / "run") as record:
        write_step(record, agents, 1, tasks=1, repeats=3)
    index = tmp_path / "run/episodes/index.jsonl"
    *others, last = (json.loads(line) for line in index.read_bytes().splitlines())
    rows = [*(row | {"tokens_raw": 2**62} for row in others), last]
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with client(tmp_path, tmp_path) as asked:
        (step,) = asked.get("/api/run?run=run").json()["steps"]
        assert (step["episodes"], step["tokens_raw"]) == (3, last["tokens_raw"])


def test_a_run_that_cannot_be_read_stays_alone_with_it(agents: Agents, tmp_path: Path):
    for name in ("good", "bad", "odd", "deep"):
        with open_record(tmp_path / name) as record:
            write_step(record, agents, 1, tasks=1, repeats=1)
    (tmp_path / "bad/episodes/index.jsonl").unlink()
    (tmp_path / "bad/episodes/index.jsonl").mkdir()
    (tmp_path / "odd/config.yaml").write_text("a: &a\n  b: *a\nc: 2001-99-99\n")
    (tmp_path / "deep/environment.json").write_text("[" * 100_000)
    with client(tmp_path, tmp_path) as asked:
        for _ in range(2):
            rows = {row["name"]: row for row in asked.get("/api/runs").json()}
            assert {name: row["state"] for name, row in rows.items()} == {
                "good": "running", "bad": "unreadable", "odd": "running",
            }  # fmt: skip
            assert rows["good"]["counts"]["episodes"] == rows["odd"]["counts"]["episodes"] == 1
            assert "index.jsonl" in rows["bad"]["error"]
            assert rows["bad"].keys() - {"error"} == rows["good"].keys()
        assert asked.get("/api/run?run=bad").status_code == 404
        assert asked.get("/api/run?run=good").status_code == 200

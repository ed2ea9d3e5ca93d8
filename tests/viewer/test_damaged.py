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

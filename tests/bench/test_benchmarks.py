"""The benchmarks run, and what they say of a workload is right; how fast they are is nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Two turns, a retry of the second, and another agent.
WORKLOAD = [
    {"agent": "a", "prompt_ids": [1, 2, 3], "completion_ids": [4, 5]},
    {"agent": "a", "prompt_ids": [1, 2, 3, 4, 5, 6], "completion_ids": [7]},
    {"agent": "a", "prompt_ids": [1, 2, 3, 4, 5, 6], "completion_ids": [8, 9]},
    {"agent": "b", "prompt_ids": [2], "completion_ids": [2]},
]


def run(benchmark: str, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / benchmark), "--workload", str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def said(benchmark: str, folder: Path, *more: str) -> dict[str, Any]:
    path = folder / "mine.json"
    path.write_text(json.dumps(WORKLOAD))
    ended = run(benchmark, path, *more)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert (found["workload"], found["raw_tokens"], found["distinct_tokens"]) == ("mine", 22, 11)
    return found


def test_merging(tmp_path: Path):
    found = said("bench_merge.py", tmp_path)
    assert {name: found[name] for name in ("calls", "samples", "trained_tokens", "certificate")} == {
        "calls": 4,
        "samples": 3,
        "trained_tokens": 6,
        "certificate": 1.0,
    }
    assert found["merge_seconds"] > 0


def test_updating(tmp_path: Path):
    found = said("bench_update.py", tmp_path, "--repeats", "1")
    assert set(found["cpu_seconds"]) == {"none", "leaf", "tree", "auto"}
    assert set(found["grad_rel_diff"]) == {"leaf", "tree", "auto"}
    assert max(found["grad_rel_diff"].values()) <= 1e-5


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"a": 1}', '[{"prompt_ids": [1]}]', '[{"prompt_ids": [1], "completion_ids": ["x"]}]']
)
def test_a_file_that_is_no_workload_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "broken.json"
    path.write_text(text)
    ended = run("bench_merge.py", path)
    assert ended.returncode == 1
    assert "broken.json" in ended.stderr
    assert "expected a JSON list of calls" in ended.stderr
    assert "Traceback" not in ended.stderr

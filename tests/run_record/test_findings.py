"""`diagnostics.jsonl`: writing, reading, resuming and summaries."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import pytest
from loguru import logger

from astuner.errors import RecordError
from astuner.run_record import read_findings
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.findings import FINDINGS_FILE, FindingsFile, RunFinding, summarise_findings
from astuner.run_record.metrics import MetricsFile
from astuner.run_record.recorded_run import find_episode, find_run


def finding(step: int, check: str, severity: str = "error", message: str = "m") -> RunFinding:
    return RunFinding(step, check, "error" if severity == "error" else "warning", message, "f")


def test_findings_are_read_as_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "plainlooking-0a1b2c3d")
    file = FindingsFile(tmp_path)
    assert not (tmp_path / FINDINGS_FILE).exists()
    file.write(finding(3, "a", message="it is plainlooking-0a1b2c3d"))
    file.close()
    assert read_findings(tmp_path) == [finding(3, "a", message="it is [redacted]")]


def test_a_run_without_findings_has_none(tmp_path: Path):
    assert read_findings(tmp_path) == []


def test_a_resumed_run_keeps_the_findings_of_earlier_steps_once(tmp_path: Path):
    file = FindingsFile(tmp_path)
    for each in (finding(0, "start"), finding(1, "a"), finding(2, "a"), finding(3, "b")):
        file.write(each)
    file.close()
    resumed = FindingsFile(tmp_path)
    resumed.write(finding(0, "start"))
    assert resumed.truncate_after(2) == 2
    resumed.close()
    assert sorted(read_findings(tmp_path), key=lambda f: f.step) == [
        finding(0, "start"),
        finding(1, "a"),
        finding(2, "a"),
    ]


def test_a_damaged_line_is_an_error_or_skipped(tmp_path: Path):
    (tmp_path / FINDINGS_FILE).write_text(
        '{"step": 1}\n{"step":1,"check":"a","severity":"error","message":"m","fix":"f"}\n'
    )
    with pytest.raises(RecordError, match="line 1: expected a finding with step"):
        read_findings(tmp_path)
    damaged: list[RecordError] = []
    assert read_findings(tmp_path, damaged.append) == [finding(1, "a")]
    assert len(damaged) == 1


def test_summaries_have_errors_first():
    found = [finding(1, "w", "warning"), *(finding(step, "e") for step in (2, 5)), finding(3, "w", "warning", "later")]
    first, second = summarise_findings(found)
    assert (first.check, first.severity, first.first_step, first.last_step, first.count) == ("e", "error", 2, 5, 2)
    assert (second.check, second.message, second.count) == ("w", "later", 2)


def test_long_values_are_shortened_in_messages(tmp_path: Path):
    long = "x" * 100_000
    (tmp_path / FINDINGS_FILE).write_text(json.dumps({"step": 1, "check": "a", "severity": long}) + "\n")
    with pytest.raises(RecordError) as damaged:
        read_findings(tmp_path)
    ids = [f"train-{n}-{long}" for n in range(9)]
    entries = [
        EpisodeEntry(1, "train", long, i, 0, "ok", 1.0, True, 0.0, 1, 1, 0, 9, 9, 9, 1.0, None, "p") for i in ids
    ]
    for name in (long, "train-", "rain-", f"train-0-{long}y", "z"):
        with pytest.raises(RecordError) as unknown:
            find_episode(name, entries)
        assert len(str(unknown.value)) < 5_000
    with pytest.raises(RecordError) as not_a_run:
        find_run("x/" * 2000, tmp_path)
    logged: list[str] = []
    handler = logger.add(logged.append, level="WARNING")
    with closing(MetricsFile(tmp_path)) as metrics:
        metrics.log(1, {long: math.nan})
    logger.remove(handler)
    assert max(len(str(damaged.value)), len(str(not_a_run.value)), len(logged[0])) < 5_000

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from astuner.errors import RecordError
from astuner.run_record import read_summary
from astuner.run_record.summary import (
    EpisodesSummary,
    RunSummary,
    TokensSummary,
    ValidationsSummary,
    ValidationSummary,
    write_summary,
)

FULL = RunSummary(
    backbone="local",
    seed=42,
    steps=30,
    seconds=312.5,
    validation=ValidationsSummary(
        before=ValidationSummary(success_rate=0.5, reward=0.45, episodes=200),
        after=ValidationSummary(success_rate=0.975, reward=0.97, episodes=200, pass_at_k={"1": 0.975, "4": 1.0}),
    ),
    first_reward_seconds=9.25,
    tokens=TokensSummary(raw=300, distinct=200, trained=100),
    episodes=EpisodesSummary(ok=900, failed=50, dropped=10),
    model="launcher_record/math/model",
)


def test_summary_file_has_the_documented_format(tmp_path: Path) -> None:
    path = write_summary(tmp_path, FULL)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_bytes()) == {
        "backbone": "local",
        "seed": 42,
        "steps": 30,
        "seconds": 312.5,
        "validation": {
            "before": {"success_rate": 0.5, "reward": 0.45, "episodes": 200},
            "after": {"success_rate": 0.975, "reward": 0.97, "episodes": 200, "pass_at_k": {"1": 0.975, "4": 1.0}},
        },
        "first_reward_seconds": 9.25,
        "tokens": {"raw": 300, "distinct": 200, "trained": 100},
        "episodes": {"ok": 900, "failed": 50, "dropped": 10},
        "model": "launcher_record/math/model",
    }


def test_summary_survives_a_round_trip(tmp_path: Path) -> None:
    least = RunSummary(backbone="debug", seed=0, steps=0, seconds=0.0)
    for summary in (FULL, least):
        write_summary(tmp_path, summary)
        assert read_summary(tmp_path) == summary


def test_run_without_validation_and_model_has_nulls(tmp_path: Path) -> None:
    content = json.loads(write_summary(tmp_path, RunSummary(backbone="local", seed=1, steps=2, seconds=3)).read_bytes())
    assert content["validation"] == {"before": None, "after": None}
    assert content["model"] is None
    assert content["first_reward_seconds"] is None


@pytest.mark.parametrize(
    "wrong",
    [{"success_rate": 1.5, "reward": 0.0, "episodes": 1}, {"success_rate": 0.5, "reward": float("nan"), "episodes": 1}],
)
def test_impossible_numbers_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        ValidationSummary.model_validate(wrong)


def test_missing_and_invalid_summaries_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*summary\.json: No such file.*did the run end"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"backbone": "local"}')
    with pytest.raises(RecordError, match=r"summary\.json is not a run summary"):
        read_summary(tmp_path)

"""A whole run with GiGPO, whose workflow returns steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import AstunerJob
from astuner.algorithms.credit_assignment import step_advantages
from astuner.algorithms.registry import resolve
from astuner.errors import BackboneError
from astuner.run_record import read_index
from astuner.run_record.episode_file import read_recorded_episode

MakeJob = Callable[..., AstunerJob]


def test_tokens_have_the_advantages_of_their_steps(make_job: MakeJob, tmp_path: Path) -> None:
    settings = {"trainer_common__total_training_steps": 1, "trainer_common__val_pass_n": 1}
    job = make_job("Rooms", algorithm="gigpo", **settings)
    record = job.tune(tmp_path / "records").record
    recorded = [read_recorded_episode(record / entry.path) for entry in read_index(record) if entry.split == "train"]
    config = job.config.astuner
    episodes = [one.episode for one in recorded]
    expected = step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)
    for one, by_call in zip(recorded, expected.call_advantages, strict=True):
        trained = [value for update in one.updates for _, value in update.advantages]
        assert len(by_call) == 2
        assert trained == pytest.approx([by_call[call.call_id] for call in one.episode.calls], rel=1e-5, abs=1e-6)
    assert len({round(value, 6) for by_call in expected.call_advantages for value in by_call.values()}) > 4


def test_a_workflow_without_steps_is_an_error(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="gigpo compares steps that begin in equal states"):
        make_job("Letters", algorithm="gigpo").tune(tmp_path / "records")

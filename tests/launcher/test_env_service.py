"""Runs whose tasks come from an environment service that they start."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import psutil

from tests.env_service import players
from tests.env_service.services import ENVIRONMENTS
from tests.launcher.conftest import Command

RUN = Path("launcher_record/run")
SETTINGS = (
    "astuner.task_reader.type=env_service",
    f"astuner.task_reader.env_service.env={ENVIRONMENTS}->GuessNumber",
    "astuner.task_reader.env_service.env_params={max_steps: 10}",
    "astuner.task_reader.env_service.env_url=auto",
    f"astuner.rollout.agentscope_workflow={players.__file__}->Plays",
    "astuner.task_judge.judge_protocol=astuner.task_judge.env_service_as_judge->EnvServiceJudge",
)


def test_a_run_starts_its_environment_service_and_resumes(astuner: Command, folder: Path) -> None:
    earlier = set(psutil.Process().children(recursive=True))
    one_step = "astuner.trainer_common.total_training_steps=1"
    ended = astuner("--conf", "run.yaml", *SETTINGS, one_step)
    assert ended.code == 0, ended.out
    assert "left out" not in ended.out
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["episodes"]["ok"] > 0
    assert summary["episodes"]["failed"] == 0
    assert "serving" in (RUN / "services/env_service.log").read_text()
    assert "env_url: auto" in (RUN / "config.yaml").read_text()
    ended = astuner("--conf", "run.yaml", *SETTINGS)
    assert ended.code == 0, ended.out
    assert json.loads((RUN / "summary.json").read_text())["steps"] == 2
    later = set(psutil.Process().children(recursive=True)) - earlier
    assert not [child for child in later if "env_service" in _command(child)]


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def test_check_reads_the_tasks_of_the_service(astuner: Command, folder: Path) -> None:
    ended = astuner("check", "--conf", "run.yaml", *SETTINGS)
    assert ended.code == 0, ended.out
    assert "20" in ended.out


def test_a_wrong_environment_is_one_error(astuner: Command, folder: Path) -> None:
    wrong = "astuner.task_reader.env_service.env=gymnasium/Chess-v9"
    astuner("check", "--conf", "run.yaml", *SETTINGS, wrong).says("task_reader.env_service", "Chess-v9")

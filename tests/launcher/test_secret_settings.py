"""Secrets in the configuration and in services' commands: nowhere in the record and on the console."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from astuner import AstunerJob
from astuner.config.loading import load_config
from tests.launcher.conftest import Command

SECRETS = {
    "verl.trainer.api_key": "hunter2x",
    "trinity.monitor.db_pass": "correct-horse-77",
    "astuner.rollout.frozen_models.critic.base_url": "http://127.0.0.1:9/v1?api_key=q1w2e3r4t5",
}
PIECES = ("hunter2x", "correct-horse-77", "q1w2e3r4t5", "o9i8u7y6", "Basic8Header", "shell-secret-1", "zz-env-secret-9")
SERVICE = {
    "command": [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "o9i8u7y6", "--x=1"],
    "env": {"DB_PASS": "zz-env-secret-9"},
}
UNUSED = {"command": "curl -H 'Authorization: Bearer Basic8Header' --password=shell-secret-1 http://127.0.0.1:9"}


def test_no_secret_of_the_configuration_is_written_anywhere(astuner: Command, folder: Path):
    tree = yaml.safe_load((folder / "run.yaml").read_text())
    tree["astuner"]["services"] = {"one": SERVICE, "two": UNUSED}
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    arguments = [f"++{key}='{value}'" for key, value in list(SECRETS.items())[:2]]
    ended = astuner("--conf", "run.yaml", "--with-one", "astuner.trainer_common.total_training_steps=1", *arguments)
    assert ended.code == 0, ended.out
    config = yaml.safe_load((folder / "launcher_record/run/config.yaml").read_text())
    assert config["verl"]["trainer"]["api_key"] == "[redacted]"
    assert config["astuner"]["services"]["one"]["command"][-2:] == ["[redacted]", "--x=1"]
    assert config["astuner"]["services"]["two"]["command"].startswith("curl -H 'Authorization: Bearer [redacted]'")
    written = {str(path): path.read_bytes() for path in (folder / "launcher_record").rglob("*") if path.is_file()}
    for place, content in {**written, "console": ended.out.encode()}.items():
        for piece in PIECES:
            assert piece.encode() not in content, (place, piece)


def test_errors_show_no_secret_of_the_configuration(astuner: Command, folder: Path):
    for arguments in (
        ("verl.trainer.api_key=hunter2x", "astuner.rollout.num_repeat=hunter2x"),
        ("verl.trainer.api_key =hunter2x",),
        ("--api-key", "hunter2x9"),
        ("--api-key=hunter2x9",),
        ("astuner.debug.base_url=ftp://user:hunter2x@host/?token=hunter2x",),
    ):
        ended = astuner("--conf", "run.yaml", *arguments)
        assert ended.code in (1, 2)
        assert "hunter2x" not in ended.out


def test_a_dumped_job_has_no_secrets(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "astuner:\n  model: {path: m}\n  rollout: {agentscope_workflow: a->B}\nverl: {trainer: {api_key: hunter2x}}\n"
    )
    path = AstunerJob().load_job_from_yaml("run.yaml").dump_job_as_yaml("saved.yaml")
    assert "hunter2x" not in path.read_text()
    assert load_config(path).config.verl == {"trainer": {"api_key": "[redacted]"}}
    assert any("verl.trainer.api_key" in message for message in log)

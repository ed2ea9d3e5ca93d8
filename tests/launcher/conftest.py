"""A folder as a user would have it, and the `astuner` command run in it, in this process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner.cli.main import main
from astuner.system.localhost import free_port
from tests.launcher.service_processes import Declare

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code.
        out: what it printed, both streams together.
    """

    code: int
    out: str

    def says(self, *parts: str) -> None:
        """Check that it failed with one calm message that has all `parts`."""
        assert self.code == 1, self.out
        assert "Traceback" not in self.out
        missing = [part for part in parts if part not in self.out]
        assert not missing, self.out
        assert "error: " in self.out.splitlines()[-1] or "\n  " in self.out


Command = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, data, agents and `run.yaml`: 2 steps of 2 tasks × 4 episodes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder, tmp_path / "model")
    shutil.copy(FOLDER / "agents.py", tmp_path / "agents.py")
    rows = [{"question": f"question {i}", "answer": "1"} for i in range(4)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "val.jsonl", [{"question": "another", "answer": "1"}])
    files = {"training": {"file_path": "train.jsonl"}, "validation": {"file_path": "val.jsonl"}}
    settings: dict[str, Any] = {
        "model": {"path": "model", "renderer": "qwen3"},
        "task_reader": {"type": "dataset_file", "dataset_file": files},
        "rollout": {
            "agentscope_workflow": "agents->Agent",
            "num_repeat": 4,
            "max_env_worker": 2,
            "max_response_length_in_one_turn": 4,
            "max_model_len": 200,
            "compute_madness_checklist": [],
        },
        "data": {"train_batch_size": 2},
        "trainer_common": {
            "total_training_steps": 2,
            "use_kl_loss": False,
            "val_pass_n": 1,
            "logger": ["console"],
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"astuner": settings}, sort_keys=False))
    return tmp_path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def astuner(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run `astuner ARGUMENTS` in `folder`."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["astuner", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code, captured.out + captured.err)

    return run


@pytest.fixture
def train(astuner: Command) -> Command:
    """Run `astuner --conf run.yaml`, with keys of section astuner: `train("model.path=x")`."""

    def run(*settings: str) -> Ended:
        return astuner("--conf", "run.yaml", *(f"astuner.{setting}" for setting in settings))

    return run


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def declare(folder: Path) -> Declare:
    """Declare services in run.yaml: `declare(name={"command": …})`."""
    shutil.copy(FOLDER / "a_service.py", folder)

    def write(**services: dict[str, Any]) -> None:
        tree = yaml.safe_load((folder / "run.yaml").read_text())
        tree["astuner"]["services"] = services
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))

    return write

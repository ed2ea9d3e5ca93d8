"""The adapter of AppWorld, with a server that has AppWorld's interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from astuner.env_service import Environment, load_environment
from astuner.errors import EnvError

SUPERVISOR = {"first_name": "Ada", "last_name": "Byron", "email": "ada@mail.com", "phone_number": "555"}
COMMAND = [sys.executable, str(Path(__file__).with_name("appworld_server.py"))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data/datasets").mkdir(parents=True)
    (tmp_path / "data/datasets/train.txt").write_text("a1_1\na1_2: tag\n\n")
    (tmp_path / "data/datasets/dev.txt").write_text("b1_1\n")
    for task_id in ("a1_1", "a1_2", "b1_1"):
        specs = {
            "instruction": f"Note milk and eggs ({task_id}).",
            "supervisor": SUPERVISOR,
            "datetime": "2023-05-18T12:00:00",
            "db_version": "1",
            "expected": ["milk", "eggs"],
        }
        (tmp_path / "data/tasks" / task_id).mkdir(parents=True)
        (tmp_path / "data/tasks" / task_id / "specs.json").write_text(json.dumps(specs))
    return tmp_path


@pytest.fixture
def environment(root: Path) -> Environment:
    return load_environment("appworld/appworld", {"root": str(root), "command": COMMAND})


def test_the_downloaded_tasks_are_listed(environment: Environment) -> None:
    assert list(environment.splits()) == ["train", "dev"]
    assert list(environment.task_ids("train")) == ["a1_1", "a1_2"]
    profile = environment.profile("dev", "b1_1")
    assert "assistant of Ada Byron" in profile.main_query
    assert profile.main_query.endswith("Task: Note milk and eggs (b1_1).")


def test_code_is_executed_and_scored(environment: Environment) -> None:
    children = set(psutil.Process().children())
    environment.reset("train", "a1_2", 0)
    (server,) = set(psutil.Process().children()) - children
    assert environment.evaluate().score == 0.0
    result = environment.step("things = ['milk']\nfor thing in things: apis.notes.add(thing)\nprint(len(things))")
    assert (result.observation.text, result.is_done) == ("1\n", False)
    assert (environment.evaluate().score, environment.evaluate().is_success) == (0.5, False)
    assert "NameError" in environment.step("unknown").observation.text
    assert not environment.step({"name": "notes", "arguments": {}}).is_valid
    assert environment.step("apis.notes.add('eggs'); apis.supervisor.complete_task()").is_done
    assert (environment.evaluate().score, environment.evaluate().is_success) == (1.0, True)
    environment.reset("train", "a1_1", 0)  # another server
    assert not server.is_running()
    assert environment.evaluate().score == 0.0
    environment.close()
    assert set(psutil.Process().children()) <= children
    with pytest.raises(EnvError, match="no server"):
        environment.step("1")


def test_what_is_missing_is_named(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(EnvError, match=f"{empty} has no AppWorld tasks .* download data --root {empty}`"):
        load_environment("appworld/appworld", {"root": str(empty), "command": COMMAND})
    with pytest.raises(EnvError, match="no program 'no-such-program'"):
        load_environment("appworld/appworld", {"root": str(root), "command": "no-such-program --fast"})
    (root / "broken").touch()
    environment = load_environment("appworld/appworld", {"root": str(root), "command": COMMAND})
    with pytest.raises(EnvError, match=r"server ended with code 1: The data does not exist\."):
        environment.reset("train", "a1_1", 0)

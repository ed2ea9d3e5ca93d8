"""The adapter of AppWorld, with a server that has AppWorld's interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner.config.loading import load_config
from astuner.env_service import Environment, load_environment
from astuner.env_service.validation import service_client
from astuner.errors import EnvError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import EnvTask, Task, WorkflowTask
from astuner.task_judge.env_service_as_judge import EnvServiceJudge
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine
from tutorial.example_appworld.appworld import ExampleAgentScopeLearnProtocol

SUPERVISOR = {"first_name": "Ada", "last_name": "Byron", "email": "ada@mail.com", "phone_number": "555"}
EXAMPLE = Path(__file__).parents[2] / "tutorial/example_appworld/appworld.yaml"
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


async def test_the_agent_of_the_example_plays_a_task(root: Path, tokenizer: Any) -> None:
    config = load_config(EXAMPLE).config.astuner
    env = config.task_reader.env_service
    assert (env.env_type, env.validation_split) == ("appworld/appworld", "dev")
    assert config.rollout.agentscope_workflow.endswith("appworld->ExampleAgentScopeLearnProtocol")
    answers = iter(
        [
            "I look around.",
            "```python\nprint(len('milk'))\n```",
            "First:\n```python\napis.notes.add('milk')\n```",
            "```python\napis.supervisor.complete_task()\n```",
        ]
    )
    prompts: list[str] = []

    def answer(prompt: Any, params: Any) -> list[int]:
        prompts.append(tokenizer.decode(prompt))
        ids: list[int] = tokenizer.encode(f"{next(answers)}<|im_end|>", add_special_tokens=False)
        return ids

    task = EnvTask(env.env_type, "train", "a1_1", {"root": str(root), "command": COMMAND})
    async with service_client([env.env_type], None) as client:
        instance = await client.create(task)
        engine = ScriptedEngine(answer, max_model_len=8192)
        runner = TaskRunner(
            ExampleAgentScopeLearnProtocol, EnvServiceJudge(config), engine, ChatCodec(tokenizer, "qwen3")
        )
        workflow_task = WorkflowTask(Task("t", instance.profile.main_query), "e", env=instance)
        episode = await runner.run(workflow_task, runner.tuner(workflow_task, CallSettings()))
    assert episode.error is None
    assert (episode.reward, episode.is_success, episode.metadata["turns"]) == (0.5, False, 3)
    assert "has no code block" in prompts[1]
    assert "4\n" in prompts[2]

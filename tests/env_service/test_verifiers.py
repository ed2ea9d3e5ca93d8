"""Environments of the real verifiers, which needs an interpreter of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner.env_service import Environment, load_environment
from astuner.env_service.adapters.verifiers import PYTHON_VARIABLE
from astuner.errors import EnvError
from astuner.system.paths import FOLDER_VARIABLE

needs_verifiers = pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no interpreter with verifiers"
)
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    params = {"cwd": HERE, "max_tasks": 3, "validation": {"taskset": {"first": 100}}}
    created = load_environment("verifiers/verifiers_tasksets", params)
    yield created
    created.close()
    assert not [
        child for child in psutil.Process().children(recursive=True) if "verifiers_bridge" in str(child.cmdline())
    ]


@needs_verifiers
def test_a_question_is_answered_and_scored(environment: Environment) -> None:
    assert environment.splits() == ("train", "validation")
    assert environment.task_ids("train") == ["0", "1", "2"]
    profile = environment.profile("train", "1")
    assert profile.main_query == "What is 1 + 1?"
    assert profile.init_messages == ({"role": "system", "content": "Be brief."},)
    for answer, score in (("2", 2.0), ("", 0.0), ("2", 2.0)):
        assert environment.reset("train", "1", 0).text == ""
        assert environment.tools == []
        assert environment.evaluate().score == 0.0
        result = environment.step(answer)
        assert (result.is_done, result.reward) == (True, score)
        evaluation = environment.evaluate()
        assert (evaluation.score, evaluation.details["metrics"]) == (score, {"length": float(len(answer))})
    with pytest.raises(EnvError, match="the task has ended"):
        environment.step("2")
    environment.reset("train", "0", 0)
    environment.reset("train", "2", 0)  # another task before the end
    assert environment.step("3").reward == 2.0
    assert environment.profile("validation", "0").main_query == "What is 100 + 1?"


@needs_verifiers
def test_tools_are_called() -> None:
    params = {"cwd": HERE, "config": {"taskset": {"task": {"has_tools": True}}}}
    environment = load_environment("verifiers/verifiers_tasksets", params)
    try:
        environment.reset("train", "1", 0)
        (tool,) = environment.tools
        name = tool["function"]["name"]
        assert tool["function"]["description"] == "Add two numbers."
        result = environment.step({"name": name, "arguments": {"a": 1, "b": 1}})
        assert (result.observation.text, result.is_done) == ("2", False)
        assert "invalid tool call" in environment.step({"name": "none", "arguments": {}}).observation.text
        assert environment.step("2").reward == 2.0
    finally:
        environment.close()


@needs_verifiers
@pytest.mark.parametrize(
    ("name", "params", "error"),
    [
        ("no_such_taskset", {}, "could not load no_such_taskset: ModuleNotFoundError"),
        (
            "verifiers_tasksets",
            {"config": {"taskset": {"frist": 1}}},
            "could not load verifiers_tasksets: (?s:.*)taskset.frist",
        ),
        ("verifiers_tasksets", {"config": {"id": "user-sim"}}, "has the agents assistant, user; only those with one"),
    ],
)
def test_invalid_configurations_are_errors(name: str, params: dict[str, Any], error: str) -> None:
    environment = load_environment(f"verifiers/{name}", {"cwd": HERE, **params})
    with pytest.raises(EnvError, match=error):
        environment.task_ids("train")
    environment.close()


def test_an_interpreter_without_verifiers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(EnvError, match=f"no interpreter is set.*astuner install verifiers.*{PYTHON_VARIABLE}"):
        load_environment("verifiers/x", {})
    with pytest.raises(EnvError, match="there is no interpreter '/none/python'"):
        load_environment("verifiers/x", {"python": "/none/python"})
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no module named verifiers >&2\nexit 1\n")
    program.chmod(0o755)
    environment = load_environment("verifiers/x", {"python": str(program)})
    with pytest.raises(EnvError, match="the process of verifiers ended in load: no module named verifiers"):
        environment.task_ids("train")

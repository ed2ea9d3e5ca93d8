"""Environments on real OpenEnv servers, which need an interpreter with the package `openenv`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from astuner.env_service import Environment, load_environment
from astuner.errors import EnvError
from astuner.system.localhost import free_port

PYTHON = os.environ.get("ASTUNER_OPENENV_PYTHON", "")
needs_openenv = pytest.mark.skipif(not PYTHON, reason="ASTUNER_OPENENV_PYTHON names no interpreter with openenv")
Serve = Callable[..., Environment]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server and returns its environment."""
    servers = []

    def start(name: str, **params: Any) -> Environment:
        port = free_port()
        with (tmp_path / f"{name}.txt").open("wb") as out:
            command = [PYTHON, str(Path(__file__).with_name("openenv_server.py")), name, str(port)]
            servers.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path))
        url = f"http://127.0.0.1:{port}"
        limit = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{url}/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                assert servers[-1].poll() is None, (tmp_path / f"{name}.txt").read_text()
                assert time.monotonic() < limit
                time.sleep(0.1)
        return load_environment(f"openenv/{name}", {"url": url, **params})

    yield start
    for server in servers:
        server.kill()
        server.wait()


@needs_openenv
def test_a_text_becomes_the_only_required_string_of_the_action(serve: Serve) -> None:
    environment = serve("guess", tasks={"train": 3, "validation": 2}, reset={"highest": 4})
    assert environment.splits() == ["train", "validation"]
    assert not set(environment.task_ids("train")) & set(environment.task_ids("validation"))
    assert environment.profile("train", "0").main_query == "Guess the number."
    rewards = []
    for _ in range(2):
        assert environment.reset("train", "1", 7).text == "guess a number up to 4"
        results = []
        for number in range(1, 5):
            results.append(environment.step(str(number)))
            if results[-1].is_done:
                break
        assert [result.reward for result in results[:-1]] == [0.0] * (len(results) - 1)
        assert (results[-1].observation.text, results[-1].reward) == ("right", 1.0)
        assert environment.evaluate().score == 1.0
        with pytest.raises(EnvError, match="ended"):
            environment.step("1")
        rewards.append(len(results))
        environment.close()
    assert rewards[0] == rewards[1]  # the seed decides
    environment.reset("train", "1", 7)
    with pytest.raises(EnvError, match="invalid literal"):
        environment.step("not a number")  # the environment itself raised
    environment.close()


@needs_openenv
def test_the_tasks_of_the_server_are_read(serve: Serve) -> None:
    environment = serve("tasks")
    assert list(environment.splits()) == ["train", "test"]
    assert list(environment.task_ids("test")) == ["0", "1"]
    assert environment.profile("test", "1").metadata == {"task": {"id": "test-1", "index": 1}}
    assert environment.reset("test", "1", 0).text == "task 1 of test"
    assert environment.step("1").is_done
    environment.close()


@needs_openenv
def test_actions_with_several_fields_are_json(serve: Serve) -> None:
    environment = serve("grid")
    assert environment.reset("train", "0", 0).text == '{"cells": [0, 0], "label": "empty"}'
    result = environment.step('{"row": 1, "column": 2}')
    assert (result.observation.text, result.reward) == ('{"cells": [1, 2], "label": "moved"}', 0.5)
    for invalid in ("up", '{"row": 1}', "[1, 2]"):
        result = environment.step(invalid)
        assert not result.is_valid
        assert "Invalid action" in result.observation.text
    assert environment.evaluate().score == 0.5
    environment.close()
    with pytest.raises(EnvError, match="no session"):
        environment.step('{"row": 1, "column": 2}')


@needs_openenv
def test_tools_of_an_mcp_environment_are_called(serve: Serve) -> None:
    environment = serve("tools")
    environment.reset("train", "0", 0)
    (tool,) = environment.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    result = environment.step({"name": "add", "arguments": {"a": 2, "b": 40}})
    assert "42" in result.observation.text
    environment.close()


@needs_openenv
def test_wrong_parameters_are_named(serve: Serve) -> None:
    with pytest.raises(EnvError, match=r"no field 'text'; they have .*message"):
        serve("guess", action_field="text")
    environment = serve("guess", observation_field="board")
    with pytest.raises(EnvError, match="no field 'board'; its fields are text"):
        environment.reset("train", "0", 0)
    environment.close()


def test_a_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(EnvError, match=r"no OpenEnv server answers at http://127.0.0.1:9"):
        load_environment("openenv/guess", {"url": "http://127.0.0.1:9"})
    with pytest.raises(EnvError, match="url must be the address"):
        load_environment("openenv/guess", {"url": "127.0.0.1:8000"})
    with pytest.raises(EnvError, match="missing 1 required positional argument: 'url'"):
        load_environment("openenv/guess")

"""Environments on MCP servers: a real FastMCP server, over stdio and over HTTP."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner.env_service.environment import Environment, load_environment
from astuner.errors import EnvError
from astuner.system.localhost import free_port
from tests.env_service.services import wait_until

SERVER = Path(__file__).parent / "mcp_server.py"
STDIO = {"command": [sys.executable, str(SERVER)], "reset_tool": "start", "score_tool": "score"}


@pytest.fixture(autouse=True)
def _pipes_of_slow_servers() -> Iterator[None]:
    """If a server ends late, the SDK terminates it and does not close its pipes. Other tests would be told of it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, str]:
    rows = [{"id": "a", "question": "Press three times.", "target": 3}, {"main_query": "Press once.", "target": 1}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": str(tmp_path / "train.jsonl")}


@pytest.fixture
def make(tasks: dict[str, str]) -> Iterator[Any]:
    made: list[Environment] = []

    def load(**params: Any) -> Environment:
        made.append(load_environment("mcp/counter", {"tasks": tasks, **params}))
        return made[-1]

    yield load
    for environment in made:
        environment.close()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_the_tools_of_a_server_are_the_actions(make: Any) -> None:
    environment = make(**STDIO)
    assert environment.splits() == ("train",)
    assert list(environment.task_ids("train")) == ["a", "2"]
    profile = environment.profile("train", "a")
    assert (profile.main_query, profile.metadata["target"]) == ("Press three times.", 3)
    assert environment.reset("train", "a", seed=7).text == "target 3, seed 7"
    names = [tool["function"]["name"] for tool in environment.tools]
    assert names == ["press", "fail", "die", "pid", "word"]
    assert environment.tools[0]["function"]["parameters"]["properties"]["times"]["type"] == "integer"
    assert environment.step(call("press", times=2)).observation.text == "count 2"
    assert environment.evaluate().score == 0.0
    assert environment.step(json.dumps(call("press"))).observation.text == "count 3"
    assert environment.evaluate().score == 0.5
    for wrong, text in (
        (call("presss"), "there is no tool 'presss'; the tools are press, fail"),
        (call("score", answer="3"), "there is no tool 'score'"),
        (call("press", times="many"), "the arguments of press are invalid: 'many' is not of type 'integer'"),
    ):
        result = environment.step(wrong)
        assert (result.is_valid, text in result.observation.text) == (False, True)
    stuck = environment.step(call("fail"))
    assert "the button is stuck" in stuck.observation.text
    assert (stuck.is_valid, stuck.is_done, stuck.info["is_error"]) == (True, False, True)
    last = environment.step("3")
    assert last.is_done
    assert environment.evaluate().score == 1.0
    with pytest.raises(EnvError, match="the task has ended"):
        environment.step(call("press"))


def test_each_instance_has_its_own_server_which_ends_with_it(make: Any) -> None:
    first, second = make(**STDIO), make(**STDIO)
    first.reset("train", "a", 1)
    second.reset("train", "2", 1)
    first.step(call("press"))
    assert second.step(call("press")).observation.text == "count 1"
    pids = [int(environment.step(call("pid")).observation.text) for environment in (first, second)]
    assert len(set(pids)) == 2
    first.close()
    wait_until(lambda: not psutil.pid_exists(pids[0]))
    assert second.evaluate().score == 0.5
    with pytest.raises(EnvError, match="call reset first"):
        first.step(call("press"))


def test_a_server_over_http(make: Any) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    try:
        environment = make(url=f"http://127.0.0.1:{port}/mcp", score_tool="score")

        def is_up() -> bool:
            assert process.poll() is None
            try:
                environment.reset("train", "a", 1)
            except EnvError:
                return False
            return True

        wait_until(is_up)
        assert environment.step(call("start", target=1, seed=2)).observation.text == "target 1, seed 2"
        assert environment.step(call("press")).observation.text == "count 1"
        assert environment.evaluate().score == 0.5
        environment.close()
    finally:
        process.kill()
        process.wait()
    with pytest.raises(EnvError, match=r"the MCP server 'http://127.* did not start: ConnectError"):
        environment.reset("train", "a", 1)


def test_faults_of_a_server_are_named(make: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"the MCP server '/no/such' did not start: FileNotFoundError"):
        make(command=["/no/such"]).reset("train", "a", 1)
    with pytest.raises(EnvError, match=r"the MCP server .* did not start: McpError: Connection closed"):
        make(command=[sys.executable, "-c", "input()"]).reset("train", "a", 1)
    with pytest.raises(EnvError, match=r"score_tool is 'scores', and the MCP server .* has the tools start, press"):
        make(command=STDIO["command"], score_tool="scores").reset("train", "a", 1)
    environment = make(command=STDIO["command"], score_tool="word")
    environment.reset("train", "a", 1)
    with pytest.raises(EnvError, match="the tool word returned 'high'; expected a number"):
        environment.evaluate()
    with pytest.raises(EnvError, match=r"the call of the tool die failed: .*Connection closed"):
        environment.step(call("die"))
    unscored = make(command=STDIO["command"])
    with pytest.raises(EnvError, match="mcp/counter has no score_tool; set it, or score with a task judge"):
        unscored.evaluate()


def test_parameters_and_tasks_are_checked(make: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="needs either `command` or `url`"):
        make()
    with pytest.raises(EnvError, match="unexpected keyword argument 'comand'"):
        make(comand=["x"])
    for text, message in (
        ("[1]\n", r"line 1: expected an object with main_query, question or instruction"),
        ('\n{"question": "a"\n', r"line 2: not JSON: Expecting ',' delimiter"),
        ('{"question": "a", "id": 1}\n{"question": "b", "id": 1}\n', r"line 2: another row has the id '1'"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(EnvError, match=message):
            make(command=["x"], tasks={"train": str(tmp_path / "bad.jsonl")})
    with pytest.raises(EnvError, match=r"the tasks of mcp/counter cannot be read: FileNotFoundError"):
        make(command=["x"], tasks={"train": str(tmp_path / "missing.jsonl")})

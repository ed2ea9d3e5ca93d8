"""Task folders in Harbor's format, in the sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from astuner.env_service import Environment, load_environment
from astuner.env_service.adapters.harbor_tasks import read_task
from astuner.errors import EnvError
from astuner.schema import Evaluation
from tests.sandbox.namespaces import needs_namespaces

TASK = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n',
    "instruction.md": "Sort data.txt into sorted.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data.txt ./\n",
    "environment/data.txt": "3\n1\n2\n",
    "tests/test.sh": """#!/bin/bash
diff <(sort data.txt) sorted.txt
echo $((1 - $?)) > /logs/verifier/reward.txt
""",
    "solution/solve.sh": "#!/bin/bash\nsort data.txt > sorted.txt\n",
}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes a task folder; its arguments replace files, and None removes them."""

    def write(name: str = "sort", files: dict[str, str | None] | None = None) -> Path:
        folder = tmp_path / "tasks" / name
        for path, text in {**TASK, **(files or {})}.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return write


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    environments: list[Environment] = []

    def start(folder: Path, **params: Any) -> Any:
        environments.append(load_environment(f"harbor/{folder}", params))
        return environments[-1]

    yield start
    for environment in environments:
        environment.close()


async def score(environment: Any, task_id: str, *actions: Any) -> Evaluation:
    await environment.reset("train", task_id, 0)
    for action in actions:
        result = await environment.step(action)
    assert not actions or result.is_done or actions[-1] != "submit"
    evaluation: Evaluation = await environment.evaluate()
    return evaluation


@needs_namespaces
async def test_commands_change_files_and_the_tests_give_the_score(make: Make, load: Any) -> None:
    environment = load(make().parent)
    assert (environment.splits(), environment.task_ids("train")) == (["train"], ("sort",))
    profile = environment.profile("train", "sort")
    assert profile.main_query.startswith(
        "Sort data.txt into sorted.txt.\n\nYou work in a Linux shell, in the folder /app."
    )
    assert profile.metadata["difficulty"] == "easy"
    assert (await environment.reset("train", "sort", 0)).text == "Files in /app:\ndata.txt\n"
    result = await environment.step("cat data.txt; ls missing")
    assert result.observation.text.startswith("3\n1\n2\nls: cannot access")
    assert result.observation.text.endswith("[exit code 2]")
    assert not (await environment.step(" ")).is_valid
    assert (await score(environment, "sort", "touch sorted.txt", "submit")).score == 0
    assert (await score(environment, "sort", *profile.reference.actions)).is_success
    call = {"name": "run", "arguments": {"command": "sort data.txt > sorted.txt"}}
    evaluation = await score(environment, "sort", call, {"name": "submit", "arguments": {}})
    assert evaluation.details["rewards"] == {"reward": 1.0}
    assert await environment.evaluate() == evaluation
    with pytest.raises(EnvError, match="the task has ended"):
        await environment.step("ls")
    assert (make() / "environment/data.txt").read_text() == "3\n1\n2\n"


@needs_namespaces
async def test_the_agent_cannot_write_the_reward_or_read_the_tests(make: Make, load: Any) -> None:
    environment = load(make())
    mark = uuid4().hex  # the processes of other tests do not have it
    write = f"mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; : {mark}"
    cheats = (
        write,
        f"(setsid bash -c 'while true; do {write}; sleep 0.01; done' &)",
        "ls /tests; cat /tests/test.sh",
        "ln -s /logs /app/logs; touch /app/sorted.txt",
    )
    await environment.reset("train", "sort", 0)
    texts = [(await environment.step(cheat)).observation.text for cheat in cheats]
    assert "Permission denied" in texts[0]
    assert texts[2].count("No such file") == 2
    assert (await environment.evaluate()).score == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())]
    leaving = f"ln -sf {make()}/tests/test.sh /logs/verifier/reward.txt"
    linked = load(make("linked", {"tests/test.sh": leaving}))
    with pytest.raises(EnvError, match="wrote neither"):
        await score(linked, "linked")


@needs_namespaces
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", 0.5),
        ('echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json', 0.25),
        ("echo '{\"accuracy\": 0.75}' > /logs/verifier/reward.json", 0.75),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', 1.0),
        ("exit 3", 0.0),
        ("echo 1 > /logs/verifier/reward.txt; sleep 600", 0.0),
        ("echo $BONUS > /logs/verifier/reward.txt", 7.0),
        ("echo nothing", "wrote neither .*its output: nothing"),
        ("echo much > /logs/verifier/reward.txt", "reward.txt is not valid: 'much"),
    ],
)
async def test_rewards_are_read_as_in_harbor(make: Make, load: Any, script: str, expected: float | str) -> None:
    seconds = 1 if "sleep" in script else 600
    config = f'[verifier]\ntimeout_sec = {seconds}\n[verifier.env]\nBONUS = "7"\n'
    environment = load(make("t", {"tests/test.sh": script, "task.toml": config}))
    if isinstance(expected, str):
        with pytest.raises(EnvError, match=expected):
            await score(environment, "t")
    else:
        assert (await score(environment, "t")).score == expected


@needs_namespaces
async def test_times_are_limits(make: Make, load: Any) -> None:
    environment = load(make("slow", {"task.toml": "[agent]\ntimeout_sec = 600\n"}), command_timeout=0.5)
    await environment.reset("train", "slow", 0)
    result = await environment.step("sleep 600")
    assert "exceeded the timeout of 0.5 seconds" in result.observation.text
    assert not result.is_done
    environment = load(make("short", {"task.toml": "[agent]\ntimeout_sec = 1\n"}), command_timeout=600)
    await environment.reset("train", "short", 0)
    assert (await environment.step("sleep 600")).is_done


@needs_namespaces
async def test_sizes_and_the_number_of_steps_are_limits(make: Make, load: Any) -> None:
    config = "[agent]\ntimeout_sec = 600\n[environment]\nstorage_mb = 1\nmemory = '1G'\n"
    environment = load(make("t", {"task.toml": config}), command_timeout=120, max_steps=4)
    await environment.reset("train", "t", 0)
    assert "MemoryError" in (await environment.step("python3 -c 'bytearray(2 << 30)'")).observation.text
    result = await environment.step("for i in 1 2 3; do head -c 600000 /dev/zero > $i; done")
    assert result.is_done
    assert "larger than 1048576 bytes" in result.observation.text
    await environment.reset("train", "t", 0)
    assert [(await environment.step("true")).is_done for _ in range(4)] == [False, False, False, True]


@needs_namespaces
async def test_dockerfiles_that_copy_files_are_read(make: Make, load: Any) -> None:
    files = {
        "environment/Dockerfile": """# comment
FROM --platform=linux/amd64 docker.io/library/python:3.13-slim AS base
ENV A=1 B="two words"
ENV OLD form
LABEL x=y
WORKDIR /srv
WORKDIR work
COPY --chown=root:root *.txt \\
     notes/
COPY ["data.txt", "/data/in.txt"]
COPY lib /opt/lib/
COPY data.txt .
CMD ["bash"]
""",
        "environment/other.txt": "o",
        "environment/lib/a/b.txt": "b",
        "solution/helper.py": "open('sorted.txt', 'w').write(''.join(sorted(open('data.txt'))))",
        "solution/solve.sh": "python3 /solution/helper.py",
    }
    environment = load(make("t", files))
    await environment.reset("train", "t", 0)
    result = await environment.step("pwd; find . /data /opt/lib -type f | sort; echo $A $B $OLD")
    assert result.observation.text.split("\n") == [
        *("/srv/work", "./data.txt", "./notes/data.txt", "./notes/other.txt", "/data/in.txt", "/opt/lib/a/b.txt"),
        "1 two words form",
    ]
    assert (await score(environment, "t", *environment.profile("train", "t").reference.actions)).score == 1


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"environment/Dockerfile": "FROM ghcr.io/me/tool:1"}, "needs the container image 'ghcr.io/me/tool:1'"),
        ({"environment/Dockerfile": "FROM ubuntu\nRUN make"}, "Dockerfile has `RUN make`"),
        ({"environment/Dockerfile": "FROM ubuntu\nFROM scratch"}, "image 'scratch'"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY --from=a b c"}, "has `COPY --from=a`"),
        ({"environment/Dockerfile": "FROM ubuntu\nADD http://x/y z"}, "has `ADD http"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY data.txt /usr/x"}, "the target of COPY is /usr/x"),
        ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR /"}, "the working directory is /"),
        ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR $HOME"}, "uses a variable"),
        ({"environment/docker-compose.yaml": ""}, "needs Docker Compose"),
        ({"task.toml": "[environment]\ndocker_image = 'x/y'"}, r"image 'x/y' \(environment.docker_image\)"),
        ({"task.toml": "[environment]\ngpus = 1"}, "needs a GPU"),
        ({"task.toml": "[environment]\nallow_internet = true"}, "needs the network"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "another operating system"),
        ({"task.toml": "[verifier.env]\nKEY = '${KEY}'"}, "needs the variable KEY of the host"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"tests/test.sh": "# curl\napt-get update"}, "test.sh calls `apt-get`, which needs the network"),
        ({"tests/test.sh": None}, "has no tests/test.sh"),
    ],
)
def test_tasks_that_need_more_are_refused_by_name(make: Make, files: dict[str, str | None], reason: str) -> None:
    folder = make("hard", files)
    make("easy")
    with pytest.raises(EnvError, match=rf"1 tasks of .*/tasks cannot run .*\n- hard: .*{reason}"):
        load_environment(f"harbor/{folder.parent}", {})
    environment = load_environment(f"harbor/{folder.parent}", {"skip_unsupported": True})
    assert environment.task_ids("train") == ("easy",)
    with pytest.raises(EnvError, match="hard"):
        load_environment(f"harbor/{folder}", {"skip_unsupported": True})


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"task.toml": "version ="}, "cannot be read: Invalid value"),
        ({"instruction.md": None}, "cannot be read: .*No such file"),
        ({"task.toml": "agent = 1"}, "agent must be a table, got 1"),
        ({"task.toml": "[agent]\ntimeout_sec = -1"}, "agent.timeout_sec must be positive seconds, got -1"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "must be a size such as 2G, got 'much'"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY none /app"}, "copies 'none', and there is no such file"),
    ],
)
def test_invalid_tasks_are_errors(make: Make, files: dict[str, str | None], error: str) -> None:
    with pytest.raises(EnvError, match=error):
        load_environment(f"harbor/{make('t', files)}", {})


def test_tasks_are_split_by_their_names(make: Make, tmp_path: Path) -> None:
    for number in range(20):
        folder = make(f"t{number}").parent
    environment = load_environment(f"harbor/{folder}", {"validation_share": 0.3})
    train, validation = map(set, map(environment.task_ids, ("train", "validation")))
    assert len(train | validation) == 20
    assert train
    assert validation
    assert not train & validation
    assert load_environment(f"harbor/{folder}", {"validation_share": 1.0}).splits() == ["validation"]
    with pytest.raises(EnvError, match=f"{tmp_path} has no Harbor tasks"):
        load_environment(f"harbor/{tmp_path}", {})
    with pytest.raises(EnvError, match="validation_share must be from 0 to 1, got 30"):
        load_environment(f"harbor/{folder}", {"validation_share": 30})
    assert read_task(make("t", {"environment/Dockerfile": None})).cwd == "/app"


@needs_namespaces
def test_files_of_a_killed_process_are_removed_by_the_next(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = """
import asyncio, os, sys
from astuner.env_service import load_environment
asyncio.run(load_environment(sys.argv[1], {}).reset("train", "sort", 0))
os.kill(os.getpid(), 9)
"""
    name = f"harbor/{make()}"
    subprocess.run([sys.executable, "-c", code, name], check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert len(list(tmp_path.glob("astuner-shell-*"))) == 1
    environment: Any = load_environment(name, {})
    asyncio.run(environment.reset("train", "sort", 0))
    assert len(list(tmp_path.glob("astuner-shell-*"))) == 1
    environment.close()
    assert not list(tmp_path.glob("astuner-shell-*"))

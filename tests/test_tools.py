"""Model-written code runs in a sandbox: it works, it harms nothing, and nothing of it remains."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from agentscope.tool import Toolkit, execute_python_code

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Episode, Task
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from astuner.tools import run_python, sandbox_agentscope
from tests import preloaded
from tests.scripted_engine import ScriptedEngine

FORMAT = re.compile(r"<returncode>(-?\d+)</returncode><stdout>(.*)</stdout><stderr>(.*)</stderr>", re.DOTALL)
BEFORE = (execute_python_code.__doc__, execute_python_code.__name__)


def parts(response: Any) -> tuple[int, str, str]:
    """Return the return code, stdout and stderr of a tool's response."""
    match = FORMAT.fullmatch(response.content[0]["text"])
    assert match
    return int(match[1]), match[2], match[3]


async def run(code: str, timeout: float = 60) -> tuple[int, str, str]:
    return parts(await run_python(code, timeout))


@pytest.fixture(autouse=True)
def _nothing_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check after each test that no folder and no process of the sandbox is left, and that processes can be started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {process.pid for process in psutil.process_iter()}
    yield
    assert not list(tmp_path.glob("astuner-sandbox-*"))
    assert not asyncio.run(_left_since(before))
    subprocess.run([sys.executable, "-c", "bytearray(100 << 20)"], check=True)


def test_a_program_prints_the_same_each_time() -> None:
    """Also where it names its folder, because the next call of the model depends on the text."""
    first, second = (asyncio.run(run("import os; print(os.getcwd(), flush=True); 1 / 0")) for _ in range(2))
    assert first == second
    assert first[1] == "/tmp/sandbox\n"
    assert 'File "/tmp/sandbox/program.py", line 1' in first[2]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", (0, "42\n", "")),
        ("print('é 世界 🎉')", (0, "é 世界 🎉\n", "")),
        ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", (3, "out\n", "err\n")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", (-11, "", "")),
        ("", (0, "", "")),
        ("print(input())", (1, "", "EOFError")),
        ("1 / 0", (1, "", "ZeroDivisionError")),
        ("import numpy; print(numpy.eye(2).sum())", (0, "2.0\n", "")),
        ("import asyncio; print(asyncio.run(asyncio.sleep(0, 5)))", (0, "5\n", "")),
        (
            "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)",
            (0, "1\n0\n", ""),
        ),
        ("open('note', 'w').write('x'); print(open('note').read())", (0, "x\n", "")),
        ("import tempfile; print(tempfile.TemporaryFile().write(b'abc'))", (0, "3\n", "")),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", (0, "\ufffd", "")),
    ],
)
async def test_code_runs(code: str, expected: tuple[int, str, str]) -> None:
    returncode, stdout, stderr = await run(code)
    assert (returncode, stdout) == expected[:2], stderr
    assert expected[2] in stderr


async def test_code_that_is_not_text_fails_as_code() -> None:
    returncode, _, stderr = await run("print('\ud800')")
    assert returncode == 1
    assert stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(open('{home}/.secret').read())", "PermissionError"),
        ("import os; print(os.listdir('{home}'))", "PermissionError"),
        ("open('{home}/new', 'w')", "PermissionError"),
        ("import os; os.remove('{home}/.secret')", "PermissionError"),
        ("import os; print(open(f'/proc/{pid}/environ').read())", "Error"),
        ("import os; os.kill({pid}, 9)", "Error"),
        ("import os; print(open('/etc/shadow').read())", "PermissionError"),
        ("import os; os.symlink('{home}/.secret', 'link'); print(open('link').read())", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', {port}))", "PermissionError"),
        ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}')", "Operation not permitted"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("file = open('big', 'wb')\nwhile True: file.write(bytes(1 << 20))", "File too large"),
        (
            "for number in range(100):\n    open(str(number), 'wb').write(bytes(60 << 20))",
            "No space left on device",
        ),
        ("import os\nwhile os.fork() >= 0: pass", "temporarily unavailable"),
        (
            "import threading\nwhile True: threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "start new",
        ),
    ],
)
async def test_operations_that_the_sandbox_rejects(code: str, error: str, tmp_path: Path) -> None:
    (tmp_path / ".secret").write_text("my key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"home": tmp_path, "port": server.getsockname()[1], "pid": os.getpid()}
        for name, value in values.items():
            code = code.replace("{" + name + "}", str(value))
        returncode, stdout, stderr = await run(code, 30)
    assert returncode != 0
    assert error in stderr
    assert "my key" not in stdout + stderr
    assert (tmp_path / ".secret").read_text() == "my key"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".secret"]


async def test_code_sees_no_environment_variable_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "my key")
    _, stdout, _ = await run("import os, json; print(json.dumps(dict(os.environ)))")
    environment = json.loads(stdout)
    assert "OPENAI_API_KEY" not in environment
    assert "ASTUNER_EPISODE" not in environment
    _, stdout, _ = await run("import os, pathlib; print(os.listdir(pathlib.Path.home()))")
    assert stdout == "['program.py']\n"


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "import os\nwhile os.fork(): pass\nwhile True: pass"]
)
async def test_endless_code_ends_with_its_time(code: str) -> None:
    before = {process.pid for process in psutil.process_iter()}
    returncode, stdout, stderr = await run(f"print('started', flush=True)\n{code}", 2)
    assert "started" in stdout or "Traceback" in stderr
    if "fork" not in code:
        assert (returncode, stderr) == (-1, "TimeoutError: The code execution exceeded the timeout of 2 seconds.")
    assert not await _left_since(before)


async def test_processes_share_the_limit_of_memory() -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1 << 20)) * 512
        time.sleep(600)
time.sleep(600)
"""
    returncode, _, stderr = await run(code, 120)
    assert returncode == -1
    assert "MemoryError: The processes of the code used more than" in stderr


async def test_memory_that_forked_processes_share_counts_once() -> None:
    code = """
import os, time
kept = bytearray(os.urandom(1 << 20)) * 700
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        time.sleep(2)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
print(len(kept) >> 20)
"""
    assert await run(code) == (0, "700\n", "")


async def test_the_response_says_which_protections_it_had() -> None:
    full = ["limits", "files", "network", "processes"]
    for code in ("print(1)", "while True: pass", "import os; os.kill(os.getpid(), 9)"):
        response = await run_python(code, 2)
        isolation = (response.metadata or {})["isolation"]
        assert isolation[0] == "limits"
        assert isolation == [name for name in full if name in isolation]


def test_the_tool_is_that_of_agentscope_with_another_name() -> None:
    schemas = []
    for function in (run_python, execute_python_code):
        toolkit = Toolkit()
        toolkit.register_tool_function(function)
        schemas.append(toolkit.get_json_schemas()[0]["function"])
    assert schemas[0]["name"] == "run_python"
    assert schemas[0]["parameters"] == schemas[1]["parameters"]


async def test_background_processes_end_with_the_code() -> None:
    before = {process.pid for process in psutil.process_iter()}
    code = "import subprocess; subprocess.Popen(['setsid', 'sleep', '600']); print('done')"
    assert (await run(code))[:2] == (0, "done\n")
    assert not await _left_since(before)


async def test_a_cancelled_call_leaves_no_process() -> None:
    before = {process.pid for process in psutil.process_iter()}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run("while True: pass"), 2)
    assert not await _left_since(before)


def test_a_cancelled_call_closes_its_pipes() -> None:
    code = """
import asyncio, gc, warnings
warnings.simplefilter("error", ResourceWarning)
from astuner.tools import run_python

async def main():
    for seconds in (0, 0.01, 0.05, 0.3):
        call = asyncio.create_task(run_python("while True: pass", 10))
        await asyncio.sleep(seconds)
        call.cancel()
        await asyncio.wait([call])

asyncio.run(main())
gc.collect()
"""
    ended = preloaded.run_python("-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


async def _left_since(before: set[int]) -> list[str]:
    """Return the processes of this test's sandboxes that run some time later."""
    left: list[str] = []
    for _ in range(100):
        new = [process for process in psutil.process_iter() if process.pid not in before]
        left = [_command(process) for process in new if _folder(process).startswith(f"{tempfile.gettempdir()}/")]
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


def _folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def test_long_output_is_cut() -> None:
    returncode, stdout, stderr = await run("for _ in range(10_000): print('a' * 100_000)")
    assert (returncode, stderr) == (0, "")
    assert stdout.startswith("a" * 60_000)
    assert len(stdout) < 70_000
    assert stdout.endswith("[999944464 more bytes were cut]")


def test_without_user_namespaces_the_rest_holds(tmp_path: Path) -> None:
    """As in a container whose system call filter allows no namespaces."""
    code = """
import asyncio, sys
from astuner.tools import run_python
async def main():
    for code in (
        "print(6 * 7)",
        "import socket; socket.socket()",
        f"print(open('{sys.argv[1]}').read())",
        "import os; os.kill(1, 0)",
        "import subprocess; subprocess.Popen(['setsid', 'sleep', '613']); print('done')",
        "while True: pass",
    ):
        print((await run_python(code, 3)).content[0]["text"])
asyncio.run(main())
"""
    (tmp_path / "secret").write_text("my key")
    command = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("this system has no user namespaces")
    arguments = ["sh", "-c", command, sys.executable, "-c", code, str(tmp_path / "secret")]
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", *arguments], capture_output=True, text=True, check=True
    )
    texts = ended.stdout.split("<returncode>")[1:]
    assert texts[0].startswith("0</returncode><stdout>42")
    assert all("PermissionError" in text for text in texts[1:4]), ended.stdout
    assert "done" in texts[4]
    assert "TimeoutError" in texts[5]
    assert "my key" not in ended.stdout
    assert ended.stderr.count("the sandbox of execute_python_code is incomplete on this machine") == 1
    assert "needs user namespaces" in ended.stderr
    assert not [process for process in psutil.process_iter() if _command(process) == "sleep 613"]


class UsesTool(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat([{"role": "user", "content": "hi"}])
        toolkit = Toolkit()
        toolkit.register_tool_function(execute_python_code)
        code = "import os; print('SECRET_OF_THE_RUN' in os.environ)"
        call = {"type": "tool_use", "id": "1", "name": "execute_python_code", "input": {"code": code}}
        texts = [parts(chunk) async for chunk in await toolkit.call_tool_function(call)]  # type: ignore[arg-type]
        direct = parts(await execute_python_code(code))
        assert texts == [direct]
        return WorkflowOutput(reward=1.0, metadata={"sees": direct[1].strip()})


@pytest.mark.parametrize("enabled", [True, False])
def test_the_function_of_agentscope_runs_in_the_sandbox_within_episodes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "1")
    sandbox_agentscope(enabled=enabled)
    assert (execute_python_code.__doc__, execute_python_code.__name__) == BEFORE
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    runner = TaskRunner(UsesTool, None, engine, ChatCodec(tokenizer, "default"), episode_timeout=60)
    rollout = TaskRollout(EpisodesHere(runner))
    request = BatchRequest([Task("t0", "q")], 1, "train", 0, 0, CallSettings(max_model_len=512))
    episodes: list[Episode] = rollout.run(request)
    rollout.close()
    assert episodes[0].error is None
    assert episodes[0].metadata == {"sees": str(not enabled)}
    assert (
        asyncio.run(execute_python_code("import os; print('SECRET_OF_THE_RUN' in os.environ)")).content[0]["text"]
        == "<returncode>0</returncode><stdout>True\n</stdout><stderr></stderr>"
    )  # outside of episodes
    sandbox_agentscope(enabled=False)


def test_agentscope_is_not_imported_for_the_sandbox(tmp_path: Path) -> None:
    code = """
import sys
from astuner.tools import sandbox_agentscope
sandbox_agentscope(enabled=True)
assert "agentscope" not in sys.modules
import agentscope.tool
assert agentscope.tool.execute_python_code.__code__.co_filename.endswith("astuner/tools.py")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
